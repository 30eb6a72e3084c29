"""Constrained requests: outputs that must follow a grammar.

The scheduler knows a grammar as a `Constraint` only: what it allows next, given the tokens so far. So the next step of
a constrained row is planned when its last token is known, every other step while two are in flight; other rows do not
wait for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from scheduler.prefill import Chunk
    from scheduler.row_state import RowState


class ConstraintError(ValueError):
    """An output cannot go on: it left its grammar, or the grammar is more than its limits allow."""


class Constraint(ABC):
    """One request's grammar, at the end of the tokens it was given. Used by one thread at a time.

    mask_words   int32 words of a mask; one bit for each id of the vocabulary, the lowest id in the lowest bit
    """

    mask_words: int

    @abstractmethod
    def accept(self, tokens: Sequence[int]) -> None:
        """The output goes on with these tokens. Raises ConstraintError if it may not."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the output can only end now. An output that may end, or go on, ends by a token: the mask allows the
        model's EOS then."""

    @abstractmethod
    def fill_mask(self, out: np.ndarray) -> None:
        """Write into `out` (int32[mask_words], contiguous) which tokens may come next. Raises ConstraintError."""


class StepMasks(NamedTuple):
    """Masks of some of a step's sampled tokens: int32[n] `samples`, their numbers, and int32[n, words] `words`."""

    samples: np.ndarray
    words: np.ndarray


def step_masks(
    rows: RowState, decode_rows: np.ndarray, chunks: Sequence[Chunk]
) -> tuple[StepMasks | None, list[tuple[int, str]]]:
    """The masks of a step that samples `decode_rows` and then the final ones of `chunks`.

    Also rows whose constraint failed, each with the reason: they may sample anything, since their requests are to be
    ended.
    """
    masked = [(number, int(decode_rows[number])) for number in np.flatnonzero(rows.constrained[decode_rows]).tolist()]
    last = [chunk.req.table_idx for chunk in chunks if chunk.samples]
    masked += [(number, row) for number, row in enumerate(last, len(decode_rows)) if rows.constrained[row]]
    if not masked:
        return None, []
    failed = []
    words = np.empty((len(masked), rows.constraints[masked[0][1]].mask_words), dtype=np.int32)
    for (_, row), out in zip(masked, words, strict=True):
        try:
            rows.constraints[row].fill_mask(out)
        except ConstraintError as error:
            out[:] = -1
            failed.append((row, str(error)))
    return StepMasks(np.array([number for number, _ in masked], dtype=np.int32), words), failed
