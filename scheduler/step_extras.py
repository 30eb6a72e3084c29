"""Parts of the step message that most requests never use: penalties, bias, log probabilities, masks.

A plan carries these sections only under `PlanFlags.EXTRAS`, behind all others, in this order::

    penalties       n x PENALTY_WORDS   of rows admitted in this step
    history_runs    n x 3               (row, first position, count): tokens the row has already, for its counts
    history_tokens  sum of counts       their ids, run after run
    bias_runs       n x 2               (row, count), of rows admitted in this step
    bias_ids        sum of counts       token ids, run after run
    bias_values     sum of counts       what is added to their logits, float32 bits
    logprob_rows    n x 2               (row, alternatives), of rows admitted in this step
    score_runs      n x SCORE_WORDS     prompt tokens to score in this step
    score_targets   sum of counts       their ids, run after run
    mask_samples    n                   sampled tokens (numbers in `sample`) of this step that may not be any id
    masks           n x words           the ids each may be: one bit an id, the lowest first; ids beyond are not allowed

A row keeps penalties, bias and log probabilities until it is admitted again. History names each penalised row's tokens
at admission, in one run: prompt tokens (before `prompt_len`, sent where a repetition penalty wants them) and generated
ones, which a resumed, preempted or recovered request has. What is sampled afterwards, workers count themselves.
A mask is for one token and one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

PENALTY_WORDS = 5
SCORE_WORDS = 5


class P(IntEnum):
    """Words of one `penalties` entry; the penalties are float32 bits."""

    ROW = 0
    PRESENCE = 1
    FREQUENCY = 2
    REPETITION = 3
    PROMPT_LEN = 4


class R(IntEnum):
    """Words of one `score_runs` entry: `COUNT` prompt tokens from `POSITION` on, predicted by the step's inputs from
    number `INPUT` (in batch order) on, with `TOP` alternatives each."""

    ROW = 0
    POSITION = 1
    COUNT = 2
    INPUT = 3
    TOP = 4


class ExtraCounts(NamedTuple):
    """Entries of each section; `bias_ids` counts the values too, `mask_words` the words of all masks together."""

    penalties: int = 0
    history_runs: int = 0
    history_tokens: int = 0
    bias_runs: int = 0
    bias_ids: int = 0
    logprob_rows: int = 0
    score_runs: int = 0
    score_targets: int = 0
    masks: int = 0
    mask_words: int = 0

    @property
    def possible(self) -> bool:
        """Whether sections of these counts can exist: none is negative, and all masks are as long."""
        return min(self) >= 0 and (self.mask_words % self.masks == 0 if self.masks else self.mask_words == 0)

    @property
    def words(self) -> int:
        """Length of all sections."""
        return sum(self.section_words)

    @property
    def section_words(self) -> tuple[int, ...]:
        """Length of each section, in their order."""
        return (
            PENALTY_WORDS * self.penalties, 3 * self.history_runs, self.history_tokens, 2 * self.bias_runs,
            self.bias_ids, self.bias_ids, 2 * self.logprob_rows, SCORE_WORDS * self.score_runs, self.score_targets,
            self.masks, self.mask_words,
        )  # fmt: skip


class PlanExtras:
    """Views of a plan's optional sections (any array type that slices and reshapes: numpy here, torch on a device)."""

    __slots__ = (  # noqa: RUF023
        "counts", "penalties", "history_runs", "history_tokens", "bias_runs", "bias_ids", "bias_values",
        "logprob_rows", "score_runs", "score_targets", "mask_samples", "masks",
    )  # fmt: skip

    def __init__(self, words: np.ndarray, counts: ExtraCounts) -> None:
        """`words` are the last of a plan's buffer, `counts.words` of them."""
        self.counts = counts
        sections, at = [], 0
        for size in counts.section_words:
            sections.append(words[at : at + size])
            at += size
        penalties, history_runs, self.history_tokens, bias_runs, self.bias_ids, self.bias_values = sections[:6]
        logprob_rows, score_runs, self.score_targets, self.mask_samples, masks = sections[6:]
        self.penalties = penalties.reshape(-1, PENALTY_WORDS)
        self.history_runs = history_runs.reshape(-1, 3)
        self.bias_runs = bias_runs.reshape(-1, 2)
        self.logprob_rows = logprob_rows.reshape(-1, 2)
        self.score_runs = score_runs.reshape(-1, SCORE_WORDS)
        self.masks = masks.reshape(counts.masks, counts.mask_words // max(counts.masks, 1))

    def add_up(self) -> bool:
        """Whether the runs name as many ids as the sections hold."""
        runs = ((self.history_runs, 2, self.history_tokens), (self.bias_runs, 1, self.bias_ids))
        runs += ((self.score_runs, R.COUNT, self.score_targets),)
        return all((r[:, at] >= 0).all() and int(r[:, at].sum()) == len(ids) for r, at, ids in runs)


class LogprobBlock:
    """Log probabilities of n tokens and of the `top` likeliest at each place: int32[n, 2 + 2 * top] `words`.

    Natural logarithms. Alternatives are in order of probability, the lower id first among equals; id -1 (and -inf)
    where the vocabulary has fewer.
    """

    __slots__ = ("words",)

    def __init__(self, words: np.ndarray) -> None:
        self.words = words

    def __len__(self) -> int:
        return len(self.words)

    @property
    def top(self) -> int:
        """Alternatives of each token."""
        return (self.words.shape[1] - 2) // 2

    @property
    def ranks(self) -> np.ndarray:
        """int32[n]: 1 for the likeliest token."""
        return self.words[:, 0]

    @property
    def logprobs(self) -> np.ndarray:
        """float32[n]."""
        return self.words[:, 1].view(np.float32)

    @property
    def top_ids(self) -> np.ndarray:
        """int32[n, top]."""
        return self.words[:, 2 : 2 + self.top]

    @property
    def top_logprobs(self) -> np.ndarray:
        """float32[n, top]."""
        return self.words[:, 2 + self.top :].view(np.float32)

    def narrowed(self, top: int) -> LogprobBlock:
        """With at most `top` alternatives (a step computes as many for all tokens as one wants)."""
        if top >= self.top:
            return self
        return LogprobBlock(np.concatenate([self.words[:, : 2 + top], self.words[:, 2 + self.top :][:, :top]], axis=1))

    @classmethod
    def joined(cls, blocks: Sequence[LogprobBlock], top: int) -> LogprobBlock:
        """All tokens of blocks with `top` alternatives."""
        return cls(np.concatenate([np.empty((0, 2 + 2 * top), dtype=np.int32), *[block.words for block in blocks]]))


class SampledLogprobs(NamedTuple):
    """Log probabilities of some of a step's tokens: `index` (int32[n], ascending) says which."""

    index: np.ndarray
    block: LogprobBlock


class PromptScores(NamedTuple):
    """Log probabilities of prompt tokens: int32[r, 3] `runs` of (row, first position, count), tokens run after run."""

    runs: np.ndarray
    block: LogprobBlock
