"""What both step messages share: their header's layout, the ways of 64-bit numbers, checksums, and their refusal."""

from __future__ import annotations

import zlib
from enum import IntEnum

import numpy as np

PLAN_MAGIC = 0x52445803  # "RDX" and the format's version in the low byte
RESULT_MAGIC = 0x52445282
HEADER_WORDS = 32
RESULT_HEADER_WORDS = 12
SAMPLING_WORDS = 10


class StepFormatError(ValueError):
    """A buffer is not a step message of this version: wrong magic, length, counts or checksum."""


class H(IntEnum):
    """Words of the plan header."""

    MAGIC = 0
    LENGTH = 1
    CHECKSUM = 2
    STEP_ID_LOW = 3
    STEP_ID_HIGH = 4
    FLAGS = 5
    NUM_ROWS = 6
    PADDED_ROWS = 7
    NUM_DECODE = 8
    NUM_SAMPLES = 9
    NUM_TOKENS = 10
    PADDED_TOKENS = 11
    NUM_PAGE_DELTAS = 12
    NUM_TOKEN_RUNS = 13
    NUM_RUN_TOKENS = 14
    NUM_SAMPLING = 15
    NUM_SUPPRESS_RUNS = 16
    NUM_SUPPRESS_IDS = 17
    NUM_PENALTIES = 18
    NUM_HISTORY_RUNS = 19
    NUM_HISTORY_TOKENS = 20
    NUM_BIAS_RUNS = 21
    NUM_BIAS_IDS = 22
    NUM_LOGPROB_ROWS = 23
    NUM_SCORE_RUNS = 24
    NUM_SCORE_TARGETS = 25
    NUM_MASKS = 26
    NUM_MASK_WORDS = 27


class S(IntEnum):
    """Words of one `sampling` entry; floats are stored as their float32 bits, the seed as two words."""

    ROW = 0
    TEMPERATURE = 1
    TOP_P = 2
    MIN_P = 3
    TOP_K = 4
    SEED_LOW = 5
    SEED_HIGH = 6
    PROMPT_LEN = 7
    RESERVED_0 = 8
    RESERVED_1 = 9


_CHECKED = slice(H.CHECKSUM + 1, None)


def checksum(buffer: np.ndarray) -> int:
    crc = zlib.crc32(buffer[_CHECKED])
    return crc - (1 << 32) if crc >= 1 << 31 else crc


def split64(value: int) -> tuple[int, int]:
    """A 64-bit unsigned integer as two signed 32-bit words, low first."""
    low, high = value & 0xFFFFFFFF, value >> 32
    return low - ((low & 0x80000000) << 1), high - ((high & 0x80000000) << 1)


def join64(low: int, high: int) -> int:
    return ((int(high) & 0xFFFFFFFF) << 32) | (int(low) & 0xFFFFFFFF)


def as_words(data: bytes | memoryview | np.ndarray, header: int, magic: int, what: str) -> np.ndarray:
    if not isinstance(data, np.ndarray):
        view = memoryview(data)
        if view.nbytes % 4:
            raise StepFormatError(f"step {what} of {view.nbytes} bytes is not a whole number of int32 words")
        data = np.frombuffer(view, dtype=np.int32)
    if len(data) < header:
        raise StepFormatError(f"step {what} of {len(data)} words is shorter than its {header}-word header")
    if data[H.MAGIC] != magic:
        raise StepFormatError(
            f"not a step {what} of this version: magic {int(data[0]) & 0xFFFFFFFF:#010x}, expected {magic:#010x}; "
            "driver and workers must run the same raydix version"
        )
    if data[H.LENGTH] != len(data):
        raise StepFormatError(f"step {what} says {int(data[1])} words, {len(data)} arrived")
    return data
