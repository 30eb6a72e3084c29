"""A model that is only a hash: next tokens that depend on every token before them and on the sampling entry.

The content of a sequence is the sum (mod 2^64) of one mixed word per (token, position). A sum can be extended by one
token in O(1) and over a chunk with `cumsum`, and since positions are mixed in, order matters: two sequences with the
same sum are the same sequence but for a chance of 2^-64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.step import SAMPLING_WORDS, S

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SALT = np.uint64(0xD1B54A32D192ED03)


def mix64(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser (Steele, Lea, Flood 2014), elementwise on uint64: a bijection with full avalanche."""
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def token_words(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """uint64 word of each (token, position); both int arrays of one shape."""
    packed = (positions.astype(np.uint64) << np.uint64(32)) | (tokens.astype(np.uint64) & np.uint64(0xFFFFFFFF))
    return mix64(packed * _GOLDEN + _SALT)


def content_sums(tokens: np.ndarray, first_position: int = 0, before: int = 0) -> np.ndarray:
    """uint64[n]: content of the sequence through each of `tokens`, given the content `before` them."""
    words = token_words(tokens, np.arange(first_position, first_position + len(tokens)))
    sums = np.cumsum(words, dtype=np.uint64)
    sums += np.uint64(before)
    return sums


class FakeModel:
    """`next_tokens` is what the fake worker samples: a function of content, sampling entry and suppressed ids only.

    `eos_probability` of all draws give `eos_token_id`, the rest is uniform over the vocabulary (which may hit it too).
    The default of 0 suits the simulator, where lengths come from the trace.
    """

    def __init__(self, vocab_size: int = 32000, eos_token_id: int = 0, eos_probability: float = 0.0) -> None:
        if vocab_size < 1 or not 0 <= eos_token_id < vocab_size or not 0 <= eos_probability <= 1:
            raise ValueError(
                f"need vocab_size >= 1, eos_token_id inside it and a probability, got {vocab_size}, {eos_token_id}, "
                f"{eos_probability}"
            )
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self._eos_limit = np.uint64(min(int(eos_probability * 2.0**64), 2**64 - 1))

    def sampling_keys(self, entries: np.ndarray) -> np.ndarray:
        """uint64[n] from int32[n, SAMPLING_WORDS]: one word of all parameters but the row; greedy ignores the seed."""
        words = entries.astype(np.int64).astype(np.uint64)
        greedy = entries[:, S.TEMPERATURE].view(np.float32) <= 0
        words[greedy, S.SEED_LOW] = 0
        words[greedy, S.SEED_HIGH] = 0
        columns = np.arange(SAMPLING_WORDS, dtype=np.uint64) * _SALT
        mixed = mix64(words * _GOLDEN + columns)
        mixed[:, S.ROW] = 0
        return mixed.sum(axis=1, dtype=np.uint64)

    def next_tokens(self, contents: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """int32[n]: the token after each sequence of content `contents` for sampling words `keys` (both uint64[n])."""
        draw = mix64(mix64(contents) ^ keys)
        tokens = (mix64(draw + _GOLDEN) % np.uint64(self.vocab_size)).astype(np.int32)
        tokens[draw < self._eos_limit] = self.eos_token_id
        return tokens

    def next_token(self, content: int, key: int, suppressed: Sequence[int] = ()) -> int:
        """One token, drawn again (with another key) while it is suppressed; the lowest allowed id if luck runs out."""
        contents, keys = np.array([content], dtype=np.uint64), np.array([key], dtype=np.uint64)
        for _ in range(64):
            token = int(self.next_tokens(contents, keys)[0])
            if token not in suppressed:
                return token
            keys = mix64(keys + _GOLDEN)
        return next(token for token in range(self.vocab_size) if token not in suppressed)
