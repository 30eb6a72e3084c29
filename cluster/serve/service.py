"""What both completion endpoints share: the served model, opening streams, and gathering whole answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response

from cluster.config import EngineConfig
from cluster.errors import InvalidRequestError, UnknownModelError
from cluster.serve.answers import ModelCard, Usage
from cluster.serve.engine_client import EngineClient
from cluster.serve.errors import ContextLengthError
from cluster.serve.generation_request import GenerationRequest
from cluster.serve.large_answers import finished, json_text, made, num_scores
from cluster.serve.logprobs import LogprobWriter
from cluster.serve.open_call import GroupOptions
from cluster.serve.parsers import ToolParser
from cluster.serve.sse import DONE, EventStream, event, to_json
from cluster.serve.streams import StreamGroup
from cluster.serve.text import TextWorker
from cluster.serve.token_stream import Delta, ScoredToken
from scheduler.sampling_params import SamplingParams
from scheduler.step import LogprobBlock
from scheduler.structured_outputs import StructuredOutputs

Answer = TypeVar("Answer", bound=BaseModel)


@dataclass(frozen=True)
class Service:
    """A served model and the way to its engine."""

    model: str
    max_seq_len: int
    engine: EngineClient
    text: TextWorker
    config: EngineConfig
    logprobs: LogprobWriter
    tool_parser: type[ToolParser] | None = None
    has_reasoning: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def card(self) -> ModelCard:
        return ModelCard(id=self.model, created=self.created, max_model_len=self.max_seq_len)

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModelError unless `name` is the served model or left out."""
        if name is not None and name != self.model:
            raise UnknownModelError(f"the model '{name}' is not served here; this server has '{self.model}'", "model")

    def plan(
        self,
        request: GenerationRequest,
        prompts: Sequence[list[int]],
        prompt_field: str,
        default_max_tokens: int | None,
        form: StructuredOutputs | None,
    ) -> list[tuple[list[int], SamplingParams]]:
        """(prompt ids, sampling) of every choice, `n` for each prompt in turn; choice i of a prompt has seed + i.
        `form`: what each output must follow.

        Raises:
            InvalidRequestError: a prompt that does not fit, more choices than an engine holds, or a sampling value
                outside its limits.
        """
        self._check_choices(len(prompts) * request.choices, "n" if request.choices > 1 else prompt_field)
        seed = secrets.randbits(64)
        share = self._share_of_output(request, len(prompts) * request.choices)
        if share is not None:
            default_max_tokens = min(default_max_tokens or share, share)
        pairs = []
        for prompt in prompts:
            room = self.max_seq_len - len(prompt)
            if room < 1:
                raise ContextLengthError(
                    f"the prompt has {len(prompt)} tokens, but the model's context is {self.max_seq_len} tokens and "
                    "needs room for at least one more; shorten the prompt",
                    prompt_field,
                )
            first = request.sampling(seed, room, default_max_tokens, form)
            pairs += [
                (prompt, first.model_copy(update={"seed": (first.seed + choice) & ((1 << 64) - 1)}))
                for choice in range(request.choices)
            ]
        return pairs

    def _check_choices(self, choices: int, field: str) -> None:
        """Raises InvalidRequestError, for `field`, if one engine, idle, could not take so many: to try again is of no
        use. The settings are those of every replica, and any of them may be the only one that is up."""
        running, queued = self.config.max_running_requests, self.config.max_queued_requests
        if choices > running + queued:
            raise InvalidRequestError(
                f"{field}: {choices} choices (prompts x n) in one request, and an engine of this server holds "
                f"{running + queued} at most (max_running_requests {running} + max_queued_requests {queued}); send "
                "several requests, or start the server with a larger --max-queued-requests",
                field,
            )

    def _share_of_output(self, request: GenerationRequest, choices: int) -> int | None:
        """Tokens that each choice of a request may have by `max_output_tokens`; None: no limit.

        Raises:
            InvalidRequestError: the request asks for more.
        """
        most = self.config.max_output_tokens
        if most is None:
            return None
        field, asked = request.token_limit
        if choices > most or (asked or 0) * choices > most:
            raise InvalidRequestError(
                f"{field}: one request gets at most {most} tokens from this server (max_output_tokens), all its "
                f"choices together; this one asks for {choices} x {asked or 'some'}",
                field if asked else "n",
            )
        return most // choices

    def options(self, request: GenerationRequest, arrived: float, continues_text: bool) -> GroupOptions:
        """How this request's streams are served.

        Raises:
            InvalidRequestError: a priority that the server's policy would not look at.
        """
        if request.priority and self.config.policy != "priority":
            raise InvalidRequestError(
                f"priority: this server admits requests by policy {self.config.policy}, which has no priorities; leave "
                "it out, or start the server with --policy priority",
                "priority",
            )
        limits = [limit for limit in (request.timeout, self.config.request_timeout) if limit is not None]
        return GroupOptions(
            arrived=arrived,
            timeout=min(limits, default=None),
            skip_special_tokens=request.skip_special_tokens is not False,
            continues_text=continues_text,
            include_stop=bool(request.include_stop_str_in_output),
            priority=request.priority or 0,
            user=request.user,
        )

    async def answer(
        self, group: StreamGroup, count: UsageCounter, whole: Callable[[list[Choice]], Answer]
    ) -> Answer | Response:
        """The answer to a request without `stream`: `whole(choices)` once every choice has ended. With many log
        probabilities it is made in a thread, and comes as the response."""
        choices = [Choice() for _ in group.streams]
        try:
            async for index, delta in group:
                count.add(index, delta)
                choices[index].add(delta)
            size = sum(num_scores(choice.logprobs, choice.prompt_logprobs) for choice in choices)
            return await finished(lambda: whole(choices), size)
        finally:
            self.engine.close_group(group)

    async def stream(
        self,
        group: StreamGroup,
        writer: ChunkWriter,
        begin: Callable[[], Sequence[str]],
        chunks: Callable[[int, Delta], Sequence[str]],
    ) -> EventStream:
        """The answer to a request with `stream`, once the first delta is there: `begin`'s chunks, then each delta's.

        Waiting for it keeps a status code for errors that come before any token.
        """
        try:
            first = await anext(group)
        except BaseException:
            self.engine.close_group(group)
            raise

        def write(index: int, delta: Delta) -> str:
            writer.count.add(index, delta)
            return "".join([event(payload) for payload in chunks(index, delta)])

        def end() -> str:
            return (event(writer.usage()) if writer.with_usage else "") + DONE

        texts = event_texts("".join([event(payload) for payload in begin()]), first, group, write, end)
        return EventStream(texts, lambda: self.engine.close_group(group), self.config.slow_reader_timeout)


async def event_texts(
    begin: str,
    first: tuple[int, Delta],
    group: StreamGroup,
    write: Callable[[int, Delta], str],
    end: Callable[[], str],
) -> AsyncIterator[str]:
    """The events of a stream; all that there is at one moment is one text, as a write costs more than what it writes.

    Args:
        begin: what comes before the first delta.
        write: the events of one delta. end: those after the last.
    """

    async def written(index: int, delta: Delta) -> str:
        return await made(lambda: write(index, delta), num_scores(delta.logprobs, delta.prompt_logprobs))

    waiting = begin + await written(*first)
    try:
        while True:
            if not group.has_next:
                yield waiting
                waiting = ""
            waiting += await written(*await anext(group))
    except StopAsyncIteration:
        yield waiting + end()
    except Exception:
        if waiting:
            yield waiting
        raise


@dataclass
class Choice:
    """A choice as its deltas add up."""

    text: str = ""
    finish_reason: str = ""
    logprobs: list[ScoredToken] = field(default_factory=list)
    prompt_logprobs: LogprobBlock | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason


class UsageCounter:
    """Token counts of one HTTP request: each prompt counts once, whatever `n` is."""

    def __init__(self, prompts: Sequence[list[int]], choices: int) -> None:
        self._prompt_tokens = sum(map(len, prompts))
        self._choices = choices
        self._completion_tokens = 0
        self._cached = [0] * len(prompts)

    def add(self, index: int, delta: Delta) -> None:
        self._completion_tokens += delta.num_tokens
        prompt, choice = divmod(index, self._choices)
        if choice == 0:  # the other choices of a prompt share its pages by construction
            self._cached[prompt] = max(self._cached[prompt], delta.cached_tokens)

    @property
    def usage(self) -> Usage:
        return Usage.count(self._prompt_tokens, self._completion_tokens, sum(self._cached))


class ChunkWriter:
    """JSON of stream chunks. All but a few fields are the same in each chunk, so those are encoded once.

    with_usage         the last chunk has the token counts
    continuous_usage   so has every chunk, as far as they are
    """

    def __init__(
        self,
        answer_id: str,
        kind: str,
        model: str,
        count: UsageCounter,
        with_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        head = {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}
        self.count = count
        self.with_usage = with_usage
        self._head = to_json(head)[:-1]
        self._continuous_usage = continuous_usage
        self._tail = ',"usage":null}' if with_usage else "}"

    def choice(self, index: int, content: str, finish_reason: str | None, logprobs: Any = None) -> str:
        """A chunk of one choice; `content` is its own part, as JSON members: `"text":"..."`."""
        end = (
            f'"logprobs":{"null" if logprobs is None else json_text(logprobs)},"finish_reason":{to_json(finish_reason)}'
        )
        tail = f',"usage":{self.count.usage.model_dump_json()}}}' if self._continuous_usage else self._tail
        return f'{self._head},"choices":[{{"index":{index},{content},{end}}}]{tail}'

    def usage(self) -> str:
        """The last chunk."""
        return f'{self._head},"choices":[],"usage":{self.count.usage.model_dump_json()}}}'
