"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from cluster.serve.answers import Completion, CompletionChoice, new_id
from cluster.serve.protocol import COMPLETION_DEFAULT_MAX_TOKENS, CompletionRequest
from cluster.serve.service import Choice, ChunkWriter, Service, UsageCounter
from cluster.serve.sse import to_json
from cluster.serve.text_offsets import TextOffsets, offsets_in_text
from cluster.serve.token_stream import Delta, ScoredToken
from scheduler.step import LogprobBlock


async def completion(service: Service, request: CompletionRequest, arrived: float) -> Completion | Response:
    """Answer a text completion, whole or as a stream; several prompts give `n` choices each, in their order.
    A large answer is a response already, and so is a stream.

    Raises:
        RaydixError: before the first token; later errors are the stream's last event.
    """
    service.check_model(request.model)
    prompts = await asyncio.gather(*(service.text.encode(prompt) for prompt in request.prompts))
    pairs = service.plan(request, prompts, "prompt", COMPLETION_DEFAULT_MAX_TOKENS, request.output_format)
    echoes = await echoed_texts(service, request)
    group = service.engine.open(pairs, service.options(request, arrived, continues_text=True))
    count = UsageCounter(prompts, request.choices)
    texts = [
        CompletionText(service, request, prompt, echo)
        for prompt, echo in zip(prompts, echoes, strict=True)
        for _ in range(request.choices)
    ]
    answer_id = new_id("cmpl")
    if not request.stream:
        return await service.answer(
            group,
            count,
            lambda choices: Completion(
                id=answer_id,
                model=service.model,
                choices=[texts[i].whole(i, choice) for i, choice in enumerate(choices)],
                usage=count.usage,
            ),
        )

    writer = ChunkWriter(
        answer_id, "text_completion", service.model, count, request.with_usage, request.continuous_usage
    )

    def chunks(index: int, delta: Delta) -> Sequence[str]:
        text = texts[index]
        echo = text.begin(delta.prompt_logprobs)
        written = [] if echo is None else [writer.choice(index, f'"text":{to_json(text.echo)}', None, echo[0])]
        scores = text.scores(delta.text, delta.logprobs, delta.is_last)
        written.append(writer.choice(index, f'"text":{to_json(delta.text)}', delta.finish_reason, scores))
        return written

    return await service.stream(group, writer, lambda: (), chunks)


async def echoed_texts(service: Service, request: CompletionRequest) -> list[str]:
    """What `echo` puts before the choices of each prompt: the prompt's text, or nothing without it."""
    if not request.echo:
        return [""] * len(request.prompts)
    skip_special = request.skip_special_tokens is not False
    return [
        prompt if isinstance(prompt, str) else await service.text.decode(prompt, skip_special)
        for prompt in request.prompts
    ]


class CompletionText:
    """One choice's text with what `echo` and `logprobs` add to it.

    Args:
        prompt: its token ids.
        echo: the prompt's text if it is part of the choice's.
    """

    def __init__(self, service: Service, request: CompletionRequest, prompt: list[int], echo: str) -> None:
        self.echo = echo
        self._writer = service.logprobs
        self._tokenizer = service.text.tokenizer
        self._request = request
        self._prompt = prompt
        self._begun = not request.echo
        self._sent = len(echo)  # characters of the text so far
        self._waiting: deque[tuple[ScoredToken, int]] = deque()  # with their offsets
        skip_special = request.skip_special_tokens is not False
        self._offsets = (
            None if request.logprobs is None else TextOffsets(self._tokenizer, skip_special, start=len(echo))
        )

    def begin(self, prompt_logprobs: LogprobBlock | None) -> tuple[dict[str, Any] | None] | None:
        """At the first delta: the log probabilities, if any, of the echo that comes before it; None: no echo now."""
        if self._begun:
            return None
        self._begun = True
        top = self._request.logprobs
        if top is None:
            return (None,)
        offsets = offsets_in_text(self._tokenizer, self._prompt, self.echo)
        return (self._writer.echoed(self._prompt, prompt_logprobs, top, offsets),)

    def scores(self, text: str, scored: list[ScoredToken] | None, is_last: bool) -> dict[str, Any] | None:
        """`logprobs` of the next piece of text.

        A token that begins in text that is held back, since it may be a stop string's, waits with it: it begins there
        or, if that is cut off, at the end of the text.
        """
        if self._offsets is None:
            return None
        self._sent += len(text)
        self._waiting.extend((each, self._offsets.add(each.token)) for each in scored or ())
        ready = []
        while self._waiting and (is_last or self._waiting[0][1] <= self._sent):
            ready.append(self._waiting.popleft())
        return self._writer.completion([each for each, _ in ready], [min(begin, self._sent) for _, begin in ready])

    def whole(self, index: int, choice: Choice) -> CompletionChoice:
        """The choice of an answer without `stream`."""
        echo = self.begin(choice.prompt_logprobs)
        scores = self.scores(choice.text, choice.logprobs, is_last=True)
        if echo is not None and scores is not None:
            scores = {name: echo[0][name] + scores[name] for name in scores}
        wanted = self._request.prompt_logprobs
        block = choice.prompt_logprobs
        return CompletionChoice(
            index=index,
            text=self.echo + choice.text,
            logprobs=scores,
            finish_reason=choice.finish_reason,
            prompt_logprobs=(
                None if wanted is None else self._writer.prompt(self._prompt, block and block.narrowed(wanted))
            ),
        )
