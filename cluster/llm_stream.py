"""`Stream` and `RequestOutput`: a request of `LLM.generate` on its way, and what it came to."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.detokenizer import IncrementalDetokenizer
from cluster.logprobs import Logprob, of_prompt, with_tokens
from scheduler.outputs import FinishReason
from scheduler.request import Request
from scheduler.step import LogprobBlock


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One finished request.

    token_ids       generated ids; a stop token is the last of them, and not part of `text`
    text            their text up to a stop string; empty for a model without tokenizer
    finish_reason   "stop", "length", or "error" (then `error` says why)
    cached_tokens   prompt tokens that were found in the prefix cache
    logprobs        if asked for: of each generated token, a dictionary of its own and its likeliest alternatives' ids
    prompt_logprobs the same of each prompt token; None for the first, which nothing predicts
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    cached_tokens: int
    error: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class Stream:
    """One request on its way. Its text is made at the end, or token by token if a stop string may end it."""

    def __init__(
        self, request: Request, prompt_token_ids: list[int], detokenizer: IncrementalDetokenizer | None
    ) -> None:
        self.request = request
        self._prompt_token_ids = prompt_token_ids
        self.token_ids: list[int] = []
        self.cached_tokens = 0
        self.finish = FinishReason.NONE
        self.error: str | None = None
        self.prompt_logprobs: LogprobBlock | None = None
        self._logprobs: list[LogprobBlock] = []
        self._detokenizer = detokenizer
        self._watches = bool(request.sampling.stop)
        self._text = ""

    def add_logprobs(self, block: LogprobBlock) -> None:
        """Of the token that comes with it; perhaps with more alternatives than were asked for."""
        self._logprobs.append(block.narrowed(self.request.sampling.logprobs))

    def stops_at_text(self, token: int) -> bool:
        """True if `token` completes a stop string."""
        if not self._watches:
            return False
        delta = self._detokenizer.add([token])
        self._text += delta.text
        return delta.stopped

    def output(self) -> RequestOutput:
        text = self._text
        if self._detokenizer is not None:
            last = self._detokenizer.add([] if self._watches else self.token_ids, finished=True)
            text += last.text
            if last.stopped:  # what was left of a character completed a stop string
                self.finish = FinishReason.STOP
        return RequestOutput(
            prompt_token_ids=self._prompt_token_ids,
            token_ids=self.token_ids,
            text=text,
            finish_reason="error" if self.finish >= FinishReason.ERROR else self.finish.name.lower(),
            cached_tokens=self.cached_tokens,
            error=self.error,
            logprobs=self._token_logprobs(),
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _token_logprobs(self) -> list[dict[int, Logprob]] | None:
        top = self.request.sampling.logprobs
        return None if top is None else with_tokens(LogprobBlock.joined(self._logprobs, top), self.token_ids)

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.request.sampling.prompt_logprobs is None:
            return None
        return of_prompt(self.prompt_logprobs, self._prompt_token_ids)
