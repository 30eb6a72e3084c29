"""Log probabilities as users get them: one dictionary for each token."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.step import LogprobBlock

LEAST = -9999.0  # for a token that cannot come: JSON has no -inf, and OpenAI writes this


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token at one place: natural logarithm of its probability, and its rank (1: the likeliest)."""

    logprob: float
    rank: int


def logprob_dicts(block: LogprobBlock) -> list[dict[int, Logprob]]:
    """For each token of `block`: token id -> `Logprob` of its `top` likeliest alternatives, which often include it.

    The token itself is not named by the block: `with_tokens` adds it.
    """
    return [
        {
            token: Logprob(logprob, rank)
            for rank, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), 1)
            if token >= 0
        }
        for ids, logprobs in zip(block.top_ids.tolist(), block.top_logprobs.tolist(), strict=True)
    ]


def with_tokens(block: LogprobBlock, tokens: list[int]) -> list[dict[int, Logprob]]:
    """`logprob_dicts` with each of `tokens`, which the block is about, as the first key of its dictionary."""
    own = zip(tokens, block.logprobs.tolist(), block.ranks.tolist(), logprob_dicts(block), strict=True)
    return [{token: Logprob(logprob, rank)} | others for token, logprob, rank, others in own]


def of_prompt(block: LogprobBlock | None, prompt: list[int]) -> list[dict[int, Logprob] | None] | None:
    """The same of a whole prompt: None for its first token, which nothing predicts. None if `block`, which is about the
    others, never came (the request failed)."""
    if len(prompt) == 1:
        return [None]
    return None if block is None else [None, *with_tokens(block, prompt[1:])]


def finite(logprob: float) -> float:
    """As JSON can hold it: `LEAST` for -inf and NaN."""
    return logprob if logprob > LEAST else LEAST
