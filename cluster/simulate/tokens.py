"""Token ids without a tokenizer: endless streams named by a key, so that equal text is equal ids.

A prompt is a list of pieces of such streams. Two prompts share a prefix where they begin with the same pieces, which
is all that a prefix cache sees of a text.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scheduler.fake_model import mix64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Segment(NamedTuple):
    """Tokens `0 .. count` of stream `key` (an unsigned 64-bit number)."""

    key: int
    count: int


def stream_seeds(keys: np.ndarray) -> np.ndarray:
    """uint64: what `stream_tokens` wants of streams `keys` (uint64), elementwise."""
    return mix64(keys * _GOLDEN)


def stream_tokens(seeds: np.ndarray, positions: np.ndarray, vocab_size: int) -> np.ndarray:
    """int32 ids at `positions` (int) of streams of `seeds` (uint64), elementwise, in 0 .. vocab_size - 1."""
    return (mix64(seeds + positions.astype(np.uint64)) % np.uint64(vocab_size)).astype(np.int32)


def prompt_tokens(segments: tuple[Segment, ...], vocab_size: int) -> np.ndarray:
    """int32: the ids of a prompt made of `segments`."""
    seeds = stream_seeds(np.array([segment.key for segment in segments], dtype=np.uint64))
    counts = [segment.count for segment in segments]
    positions = np.concatenate([np.arange(count) for count in counts])
    return stream_tokens(np.repeat(seeds, counts), positions, vocab_size)
