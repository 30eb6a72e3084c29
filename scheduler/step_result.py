"""The answer to a step: one int32 buffer back (`StepResult`)."""

from __future__ import annotations

import numpy as np

from scheduler.step_extras import LogprobBlock, PromptScores, SampledLogprobs
from scheduler.step_words import (
    RESULT_HEADER_WORDS,
    RESULT_MAGIC,
    H,
    StepFormatError,
    as_words,
    checksum,
    join64,
    split64,
)


class StepResult:
    """What rank 0 answers to a plan: `tokens[i]` is the token sampled for batch entry `plan.sample[i]`,
    negative if the model's scores allow none.

    `tokens` is int32[num_samples]. Every plan is answered, also one that samples nothing. `logprobs` are those of the
    sampled tokens whose rows want them, `scores` those of the plan's `score_runs`; None where there are none.

    The buffer: a header (..., number of tokens; of tokens with log probabilities, and alternatives each; of score runs,
    of tokens in them, and alternatives each), then the tokens, `logprobs.index`, `logprobs.block`, `scores.runs` and
    `scores.block`.
    """

    __slots__ = ("logprobs", "scores", "step_id", "tokens")

    def __init__(
        self, step_id: int, tokens: np.ndarray,
        logprobs: SampledLogprobs | None = None, scores: PromptScores | None = None,
    ) -> None:  # fmt: skip
        self.step_id = step_id
        self.tokens = tokens
        self.logprobs = logprobs
        self.scores = scores

    def encode(self) -> np.ndarray:
        """One contiguous int32 buffer."""
        low, high = split64(self.step_id)
        sections, counts = [self.tokens], [0, 0, 0, 0, 0]
        if self.logprobs is not None:
            index, block = self.logprobs
            sections += [index, block.words.reshape(-1)]
            counts[:2] = len(index), block.top
        if self.scores is not None:
            runs, block = self.scores
            sections += [runs.reshape(-1), block.words.reshape(-1)]
            counts[2:] = len(runs), len(block), block.top
        buffer = np.empty(RESULT_HEADER_WORDS + sum(map(len, sections)), dtype=np.int32)
        buffer[:RESULT_HEADER_WORDS] = (RESULT_MAGIC, len(buffer), 0, low, high, 0, len(self.tokens), *counts)
        np.concatenate(sections, out=buffer[RESULT_HEADER_WORDS:])
        buffer[H.CHECKSUM] = checksum(buffer)
        return buffer

    @classmethod
    def decode(cls, data: bytes | memoryview | np.ndarray) -> StepResult:
        """Check a received buffer. Raises StepFormatError as `StepPlan.decode` does."""
        buffer = as_words(data, RESULT_HEADER_WORDS, RESULT_MAGIC, "result")
        counts = buffer[6:RESULT_HEADER_WORDS].tolist()
        tokens, logprobs, top, runs, scored, score_top = counts
        sizes = (tokens, logprobs, logprobs * (2 + 2 * top), 3 * runs, scored * (2 + 2 * score_top))
        if min(counts) < 0 or sum(sizes) != len(buffer) - RESULT_HEADER_WORDS or buffer[H.CHECKSUM] != checksum(buffer):
            raise StepFormatError("step result is damaged: its counts or checksum do not match its words")
        result = cls(join64(buffer[3], buffer[4]), buffer[RESULT_HEADER_WORDS : RESULT_HEADER_WORDS + tokens])
        if logprobs or runs:
            result._take_logprobs(buffer[RESULT_HEADER_WORDS + tokens :], counts)
        return result

    def _take_logprobs(self, words: np.ndarray, counts: list[int]) -> None:
        """The sections behind the tokens. Raises StepFormatError if they contradict themselves."""
        tokens, logprobs, top, runs, scored, score_top = counts
        scores = words[logprobs * (3 + 2 * top) :]
        if logprobs:
            index, block = words[:logprobs], words[logprobs : logprobs * (3 + 2 * top)]
            if index[0] < 0 or index[-1] >= tokens or (np.diff(index) <= 0).any():
                raise StepFormatError(f"step result's log probabilities are of tokens {index.tolist()} of {tokens}")
            self.logprobs = SampledLogprobs(index, LogprobBlock(block.reshape(logprobs, -1)))
        if runs:
            table = scores[: 3 * runs].reshape(-1, 3)
            if (table < 0).any() or int(table[:, 2].sum()) != scored:
                raise StepFormatError(f"step result's runs {table.tolist()} do not add up to {scored} scored tokens")
            block = scores[3 * runs :].reshape(scored, 2 + 2 * score_top)
            self.scores = PromptScores(table, LogprobBlock(block))
