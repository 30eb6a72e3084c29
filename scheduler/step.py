"""The step message: one int32 buffer down (`StepPlan`), one back (`StepResult`).

A plan is a fixed header followed by sections in a fixed order::

    header        HEADER_WORDS
    rows          padded_rows      table row of each batch entry; padding names the dummy row
    cached_len    padded_rows      tokens whose K/V exists before the step
    device_len    padded_rows      tokens that exist after the step's input
    sample        padded_rows      batch entries to sample, ascending; padding entry i holds i
    out_loc       padded_tokens    slot written by each input token, in batch order
    ------------- hot part ends: its offsets depend on the padded sizes only -------------
    page_deltas   n x 3            (row, first position, page's first slot): 12 bytes a page
    token_runs    n x 3            (row, first position, count) of host-known input tokens
    run_tokens    sum of counts    their ids, run after run
    sampling      n x SAMPLING_WORDS   parameters of rows admitted in this step
    suppress_runs n x 3            (row, until position, count): ids not to be sampled before it
    suppress_ids  sum of counts    their ids, run after run
    extras                         only under the flag EXTRAS: penalties, bias, log probabilities (`step_extras`)

Batch entries are ordered decodes first (`num_decode` of them). A worker applies page deltas, token runs, sampling
and suppress sections and extras before its forward pass, in this order. Everything after the header's checksum word is
covered by a CRC-32, so a damaged or truncated buffer is refused (`StepFormatError`), never read as garbage.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum, IntFlag

import numpy as np

from scheduler.step_extras import (
    PENALTY_WORDS,
    SCORE_WORDS,
    ExtraCounts,
    LogprobBlock,
    P,
    PlanExtras,
    PromptScores,
    R,
    SampledLogprobs,
)

__all__ = [
    "HEADER_WORDS", "PENALTY_WORDS", "RESULT_HEADER_WORDS", "SAMPLING_WORDS", "SCORE_WORDS", "ExtraCounts", "H",
    "LogprobBlock", "P", "PlanExtras", "PlanFlags", "PromptScores", "R", "S", "SampledLogprobs", "StepFormatError",
    "StepPlan", "StepPlanWriter", "StepResult", "pack_sampling", "plan_words",
]  # fmt: skip

PLAN_MAGIC = 0x52445802  # "RDX" and the format's version in the low byte
RESULT_MAGIC = 0x52445282
HEADER_WORDS = 32
RESULT_HEADER_WORDS = 12
SAMPLING_WORDS = 10


class StepFormatError(ValueError):
    """A buffer is not a step message of this version: wrong magic, length, counts or checksum."""


class PlanFlags(IntFlag):
    """`SNAPSHOT`: the plan rebuilds live rows and tree prefixes on workers that hold nothing yet.
    `EXTRAS`: the plan has the optional sections of `step_extras`."""

    NONE = 0
    SNAPSHOT = 1
    EXTRAS = 2


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


_SAMPLING_ENTRY = struct.Struct("<i3fiQ3i")  # the words of `S`; little-endian puts the seed's low word first
_COUNTS = slice(H.NUM_ROWS, H.NUM_SUPPRESS_IDS + 1)
_EXTRA_COUNTS = slice(H.NUM_PENALTIES, H.NUM_SCORE_TARGETS + 1)
_NO_EXTRAS = ExtraCounts()
_HEADER_PADDING = (0,) * (HEADER_WORDS - H.NUM_SCORE_TARGETS - 1)
_PLAIN_HEADER_END = (*_NO_EXTRAS, *_HEADER_PADDING)


def _checksum(buffer: np.ndarray) -> int:
    crc = zlib.crc32(memoryview(buffer[H.CHECKSUM + 1 :]).cast("B"))
    return crc - (1 << 32) if crc >= 1 << 31 else crc


def _split64(value: int) -> tuple[int, int]:
    """A 64-bit unsigned integer as two signed 32-bit words, low first."""
    low, high = value & 0xFFFFFFFF, value >> 32
    return low - ((low & 0x80000000) << 1), high - ((high & 0x80000000) << 1)


def _join64(low: int, high: int) -> int:
    return ((int(high) & 0xFFFFFFFF) << 32) | (int(low) & 0xFFFFFFFF)


def sampling_entry(
    *, row: int, temperature: float, top_p: float, min_p: float, top_k: int, seed: int, prompt_len: int
) -> bytes:
    """The words of one sampling entry. `top_k` 0 means off; `seed` is unsigned 64-bit."""
    return _SAMPLING_ENTRY.pack(row, temperature, top_p, min_p, top_k, seed, prompt_len, 0, 0)


def pack_sampling(out: np.ndarray, **fields: float) -> None:
    """Write a `sampling_entry` of these fields into `out` (int32[SAMPLING_WORDS])."""
    out[:] = np.frombuffer(sampling_entry(**fields), dtype="<i4")


class StepPlan:
    """Views over one plan buffer (int32, contiguous). The views share its memory; nothing is copied.

    Attributes: the counts of the header by name (`num_rows`, `padded_rows`, `num_decode`, `num_samples`,
    `num_tokens`, `padded_tokens`), and the sections. `rows`, `cached_len`, `device_len` have `padded_rows` entries,
    `out_loc` has `padded_tokens`, `sample` has `padded_rows`; the live part is the first `num_*` entries. `extras` are
    the optional sections, None in a plan without them.
    """

    __slots__ = (  # noqa: RUF023
        "buffer", "num_rows", "padded_rows", "num_decode", "num_samples", "num_tokens", "padded_tokens",
        "rows", "cached_len", "device_len", "sample", "out_loc",
        "page_deltas", "token_runs", "run_tokens", "sampling", "suppress_runs", "suppress_ids",
        "extras",
    )  # fmt: skip

    def __init__(
        self, buffer: np.ndarray, counts: Sequence[int] | None = None, extras: ExtraCounts | None = None
    ) -> None:
        """Views of `buffer`; `counts` (and those of the optional sections, if there are any) are the header's, if the
        caller has them at hand."""
        if counts is None and buffer[H.FLAGS] & PlanFlags.EXTRAS:
            extras = ExtraCounts(*buffer[_EXTRA_COUNTS].tolist())
        self.buffer = buffer
        (
            self.num_rows, padded_rows, self.num_decode, self.num_samples, self.num_tokens, padded_tokens,
            deltas, runs, run_tokens, sampling, suppress_runs, suppress_ids,
        ) = buffer[_COUNTS].tolist() if counts is None else counts  # fmt: skip
        self.padded_rows, self.padded_tokens = padded_rows, padded_tokens
        at = HEADER_WORDS

        def take(words: int) -> np.ndarray:
            nonlocal at
            at += words
            return buffer[at - words : at]

        self.rows = take(padded_rows)
        self.cached_len = take(padded_rows)
        self.device_len = take(padded_rows)
        self.sample = take(padded_rows)
        self.out_loc = take(padded_tokens)
        self.page_deltas = take(3 * deltas).reshape(-1, 3)
        self.token_runs = take(3 * runs).reshape(-1, 3)
        self.run_tokens = take(run_tokens)
        self.sampling = take(SAMPLING_WORDS * sampling).reshape(-1, SAMPLING_WORDS)
        self.suppress_runs = take(3 * suppress_runs).reshape(-1, 3)
        self.suppress_ids = take(suppress_ids)
        self.extras = None if extras is None else PlanExtras(buffer[at:], extras)

    @property
    def step_id(self) -> int:
        return _join64(self.buffer[H.STEP_ID_LOW], self.buffer[H.STEP_ID_HIGH])

    @property
    def flags(self) -> PlanFlags:
        return PlanFlags(int(self.buffer[H.FLAGS]))

    @property
    def is_decode_only(self) -> bool:
        return self.num_decode == self.num_rows

    def seal(self) -> StepPlan:
        """Write the checksum once every section is filled in. Returns self."""
        self.buffer[H.CHECKSUM] = _checksum(self.buffer)
        return self

    @classmethod
    def decode(cls, data: bytes | memoryview | np.ndarray) -> StepPlan:
        """Check a received buffer and return its views.

        Raises:
            StepFormatError: wrong magic or version, wrong length, impossible counts, or a failed checksum.
        """
        buffer = _as_words(data, HEADER_WORDS, PLAN_MAGIC, "plan")
        counts = buffer[_COUNTS].tolist()
        rows, padded_rows, decode, samples, tokens, padded_tokens, deltas, runs, run_tokens, sampling, srun, sids = (
            counts
        )
        if min(counts) < 0 or not (decode <= rows <= padded_rows and samples <= rows and tokens <= padded_tokens):
            raise StepFormatError(f"step plan has impossible counts {counts}")
        extras = ExtraCounts(*buffer[_EXTRA_COUNTS].tolist())
        if min(extras) < 0 or (extras != _NO_EXTRAS and not buffer[H.FLAGS] & PlanFlags.EXTRAS):
            raise StepFormatError(f"step plan has impossible counts {extras}")
        words = plan_words(padded_rows, padded_tokens, deltas, runs, run_tokens, sampling, srun, sids) + extras.words
        if words != len(buffer):
            raise StepFormatError(f"step plan holds {len(buffer)} words, its counts need {words}")
        if buffer[H.CHECKSUM] != _checksum(buffer):
            raise StepFormatError(
                f"step plan {_join64(buffer[H.STEP_ID_LOW], buffer[H.STEP_ID_HIGH])} fails its checksum"
            )
        plan = cls(buffer)
        if int(plan.token_runs[:, 2].sum()) != run_tokens or int(plan.suppress_runs[:, 2].sum()) != sids:
            raise StepFormatError("step plan's runs do not add up to the ids they carry")
        if plan.extras is not None and not plan.extras.add_up():
            raise StepFormatError("step plan's optional runs do not add up to the ids they carry")
        return plan


def plan_words(
    padded_rows: int, padded_tokens: int, page_deltas: int, token_runs: int, run_tokens: int,
    sampling: int, suppress_runs: int, suppress_ids: int,
) -> int:  # fmt: skip
    """Length of a plan with these counts, in int32 words; its optional sections come on top."""
    hot = HEADER_WORDS + 4 * padded_rows + padded_tokens
    return hot + 3 * (page_deltas + token_runs + suppress_runs) + run_tokens + SAMPLING_WORDS * sampling + suppress_ids


class StepPlanWriter:
    """Hands out plans backed by a ring of `ring` reused buffers: a plan's memory is rewritten `ring` plans later."""

    def __init__(self, ring: int, initial_words: int = 4096) -> None:
        self._buffers = [np.empty(initial_words, dtype=np.int32) for _ in range(ring)]
        self._next = 0

    def begin(
        self, *, step_id: int, num_rows: int, num_decode: int, num_samples: int, num_tokens: int,
        padded_rows: int | None = None, padded_tokens: int | None = None, page_deltas: int = 0, token_runs: int = 0,
        run_tokens: int = 0, sampling: int = 0, suppress_runs: int = 0, suppress_ids: int = 0,
        flags: PlanFlags = PlanFlags.NONE, extras: ExtraCounts | None = None,
    ) -> StepPlan:  # fmt: skip
        """A writable plan of these counts, sections uninitialised. Fill every section, then call `plan.seal()`.

        `extras`: counts of the optional sections; sets their flag.
        """
        padded_rows = num_rows if padded_rows is None else padded_rows
        padded_tokens = num_tokens if padded_tokens is None else padded_tokens
        words = plan_words(
            padded_rows, padded_tokens, page_deltas, token_runs, run_tokens, sampling, suppress_runs, suppress_ids
        )
        header_end = _PLAIN_HEADER_END
        if extras is not None:
            flags |= PlanFlags.EXTRAS
            words += extras.words
            header_end = (*extras, *_HEADER_PADDING)
        slot, self._next = self._next, (self._next + 1) % len(self._buffers)
        if len(self._buffers[slot]) < words:
            self._buffers[slot] = np.empty(max(words, 2 * len(self._buffers[slot])), dtype=np.int32)
        buffer = self._buffers[slot][:words]
        low, high = _split64(step_id)
        counts = (
            num_rows, padded_rows, num_decode, num_samples, num_tokens, padded_tokens,
            page_deltas, token_runs, run_tokens, sampling, suppress_runs, suppress_ids,
        )  # fmt: skip
        buffer[:HEADER_WORDS] = (PLAN_MAGIC, words, 0, low, high, int(flags), *counts, *header_end)
        return StepPlan(buffer, counts, extras)


class StepResult:
    """What rank 0 answers to a plan: `tokens[i]` is the token sampled for batch entry `plan.sample[i]`.

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
        low, high = _split64(self.step_id)
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
        buffer[H.CHECKSUM] = _checksum(buffer)
        return buffer

    @classmethod
    def decode(cls, data: bytes | memoryview | np.ndarray) -> StepResult:
        """Check a received buffer. Raises StepFormatError as `StepPlan.decode` does."""
        buffer = _as_words(data, RESULT_HEADER_WORDS, RESULT_MAGIC, "result")
        counts = buffer[6:RESULT_HEADER_WORDS].tolist()
        tokens, logprobs, top, runs, scored, score_top = counts
        sizes = (tokens, logprobs, logprobs * (2 + 2 * top), 3 * runs, scored * (2 + 2 * score_top))
        if (
            min(counts) < 0
            or sum(sizes) != len(buffer) - RESULT_HEADER_WORDS
            or buffer[H.CHECKSUM] != _checksum(buffer)
        ):
            raise StepFormatError("step result is damaged: its counts or checksum do not match its words")
        result = cls(_join64(buffer[3], buffer[4]), buffer[RESULT_HEADER_WORDS : RESULT_HEADER_WORDS + tokens])
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


def _as_words(data: bytes | memoryview | np.ndarray, header: int, magic: int, what: str) -> np.ndarray:
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
