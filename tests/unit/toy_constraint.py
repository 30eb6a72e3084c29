"""A constraint that is only arithmetic: what may come next depends on every token before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.constraint import Constraint, ConstraintError

WIDTH = 3


class ToyConstraint(Constraint):
    """Allows `WIDTH` ids at each place, and `eos` from place `may_end` on; complete after `length` tokens or an EOS.

    `fails_at`: the place for which there is no mask.
    """

    def __init__(
        self, vocab_size: int, length: int, may_end: int = 1 << 20, eos: int = 3, fails_at: int | None = None
    ) -> None:
        self.settings = (vocab_size, length, may_end, eos, fails_at)
        self.mask_words = -(-vocab_size // 32)
        self.tokens: list[int] = []

    def fresh(self) -> ToyConstraint:
        """The same at its beginning."""
        return ToyConstraint(*self.settings)

    def allowed(self) -> list[int]:
        vocab_size, _, may_end, eos, fails_at = self.settings
        place = len(self.tokens)
        if place == fails_at:
            raise ConstraintError("no mask for this place")
        first = sum(self.tokens) * 7 + place * 11
        ids = {(first + i * 13) % vocab_size for i in range(WIDTH)} - {eos}
        return sorted(ids | ({eos} if place >= may_end else set()))

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.is_complete or token not in self.allowed():
                raise ConstraintError(f"token {token} after {self.tokens}")
            self.tokens.append(token)

    @property
    def is_complete(self) -> bool:
        _, length, _, eos, _ = self.settings
        return len(self.tokens) >= length or self.tokens[-1:] == [eos]

    def mask(self) -> np.ndarray:
        bits = np.zeros(32 * self.mask_words, dtype=np.uint8)
        bits[self.allowed()] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def fill_mask(self, out: np.ndarray) -> None:
        out[:] = self.mask()
