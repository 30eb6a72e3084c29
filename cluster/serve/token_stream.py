"""One stream's way from tokens to text: what its reader gets next, and what it has had.

A stream keeps its tokens, so that it can go on when its engine is gone: see `failover`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cluster.detokenizer import IncrementalDetokenizer
from cluster.errors import EngineClosedError, OutgrownError, PoisonRequestError, RaydixError, RequestFailedError
from scheduler.outputs import FinishReason
from scheduler.step import LogprobBlock

if TYPE_CHECKING:
    from cluster.serve.streams import StreamGroup


class ScoredToken(NamedTuple):
    """A generated token and its log probabilities, a block of one."""

    token: int
    block: LogprobBlock


@dataclass(slots=True)
class Delta:
    """What is new on one stream. The last delta has `finish_reason` or `error`.

    `num_tokens` counts the tokens behind it (also those without text yet); `cached_tokens` is the prompt's share that
    came from the prefix cache. `logprobs`: of the tokens behind the text, where they were asked for, and
    `prompt_logprobs`, once, of the prompt's but the first.
    """

    text: str = ""
    num_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    error: RaydixError | None = None
    logprobs: list[ScoredToken] | None = None
    prompt_logprobs: LogprobBlock | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def merge(self, later: Delta) -> None:
        self.text += later.text
        self.num_tokens += later.num_tokens
        self.cached_tokens = max(self.cached_tokens, later.cached_tokens)
        self.finish_reason, self.error = later.finish_reason, later.error
        if later.logprobs:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs


class TokenStream:
    """One choice of one request. `advance` runs in the receiving thread, everything else in the event loop.

    `tokens` are those that have arrived: append-only, and still only after `StreamTable.renew`. `complete`: the last
    one is among them, and the last delta on its way.
    """

    def __init__(
        self,
        stream_id: int,
        detokenizer: IncrementalDetokenizer,
        group: StreamGroup,
        index: int,
        arrived: float,
        include_stop: bool = False,
        top_logprobs: int = 0,
    ) -> None:
        self.stream_id = stream_id
        self.channel: bytes | None = None  # whence its tokens come
        self.tokens: list[int] = []
        self.complete = False
        self.group = group
        self.index = index
        self.arrived = arrived  # `time.monotonic()` of the HTTP request
        self.last_token: float | None = None  # when the latest token came
        self.pending: Delta | None = None
        self.ended = False  # the last delta was posted
        self.engine_ended = False  # the engine knows that the request is over
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self._top_logprobs = top_logprobs
        self._cached_tokens = 0
        self._silent_tokens = 0  # tokens whose text is not complete yet
        self._silent_logprobs: list[ScoredToken] = []
        self._prompt_logprobs: LogprobBlock | None = None

    def score_prompt(self, block: LogprobBlock) -> None:
        """The prompt's log probabilities; they go with the next delta."""
        self._prompt_logprobs = block

    def advance(
        self, token: int, finish: int, cached_tokens: int, failure: str | None, scores: LogprobBlock | None = None
    ) -> Delta | None:
        """Apply one entry of a step message; None when there is nothing to tell yet."""
        finished = finish != FinishReason.NONE
        if finished and (error := _error(finish, failure)) is not None:
            return Delta(error=error)
        if not self.tokens:  # what the first engine found; another finds this stream's own tokens too
            self._cached_tokens = cached_tokens
        if token >= 0:
            self.tokens.append(token)
        # The stop token itself is counted; it is text only for those who asked for it.
        ids = [token] if token >= 0 and (finish != FinishReason.STOP or self._include_stop) else []
        part = self._detokenizer.add(ids, finished)
        self._silent_tokens += token >= 0
        if scores is not None and ids:
            self._silent_logprobs.append(ScoredToken(token, scores.narrowed(self._top_logprobs)))
        reason = None
        if part.stopped:
            reason = "stop"
        elif finished:
            reason = "stop" if finish == FinishReason.STOP else "length"
        if not part.text and reason is None:
            return None
        delta = Delta(part.text, self._silent_tokens, self._cached_tokens, reason)
        self._silent_tokens = 0
        if self._silent_logprobs:
            delta.logprobs, self._silent_logprobs = self._silent_logprobs, []
        delta.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return delta


def _error(finish: int, failure: str | None) -> RaydixError | None:
    """What such an end raises, if anything; `failure`: what the engine says about it."""
    if finish == FinishReason.ERROR:
        return RequestFailedError(failure or "the engine could not finish this request")
    if finish == FinishReason.INVALID:
        return OutgrownError(failure or "the engine cannot finish this request")
    if finish == FinishReason.POISON:
        return PoisonRequestError(failure or "the engine fails whenever this request runs")
    if finish == FinishReason.ABORT:
        return EngineClosedError("the request was aborted by the engine")
    return None
