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
    extras                         only under the flag EXTRAS: penalties, bias, log probabilities, masks (`step_extras`)

Batch entries are ordered decodes first (`num_decode` of them). A worker applies page deltas, token runs, sampling
and suppress sections and extras before its forward pass, in this order. Everything after the header's checksum word is
covered by a CRC-32, so a damaged or truncated buffer is refused (`StepFormatError`), never read as garbage.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntFlag

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
from scheduler.step_result import StepResult
from scheduler.step_words import (
    HEADER_WORDS,
    PLAN_MAGIC,
    RESULT_HEADER_WORDS,
    SAMPLING_WORDS,
    H,
    S,
    StepFormatError,
    as_words,
    checksum,
    join64,
    split64,
)

__all__ = [
    "HEADER_WORDS", "PENALTY_WORDS", "RESULT_HEADER_WORDS", "SAMPLING_WORDS", "SCORE_WORDS", "ExtraCounts", "H",
    "LogprobBlock", "P", "PlanExtras", "PlanFlags", "PromptScores", "R", "S", "SampledLogprobs", "StepFormatError",
    "StepPlan", "StepPlanWriter", "StepResult", "pack_sampling", "plan_words",
]  # fmt: skip

_SAMPLING_ENTRY = struct.Struct("<i3fiQ3i")  # the words of `S`; little-endian puts the seed's low word first
_HEADER = struct.Struct(f"={HEADER_WORDS}i")
_COUNTS = slice(H.NUM_ROWS, H.NUM_SUPPRESS_IDS + 1)
_EXTRA_COUNTS = slice(H.NUM_PENALTIES, H.NUM_MASK_WORDS + 1)
_NO_EXTRAS = ExtraCounts()
_HEADER_PADDING = (0,) * (HEADER_WORDS - H.NUM_MASK_WORDS - 1)
_PLAIN_HEADER_END = (*_NO_EXTRAS, *_HEADER_PADDING)


class PlanFlags(IntFlag):
    """`SNAPSHOT`: the plan rebuilds live rows and tree prefixes on workers that hold nothing yet.
    `EXTRAS`: the plan has the optional sections of `step_extras`."""

    NONE = 0
    SNAPSHOT = 1
    EXTRAS = 2


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
        self.rows = buffer[at : (at := at + padded_rows)]
        self.cached_len = buffer[at : (at := at + padded_rows)]
        self.device_len = buffer[at : (at := at + padded_rows)]
        self.sample = buffer[at : (at := at + padded_rows)]
        self.out_loc = buffer[at : (at := at + padded_tokens)]
        self.page_deltas = buffer[at : (at := at + 3 * deltas)].reshape(deltas, 3)
        self.token_runs = buffer[at : (at := at + 3 * runs)].reshape(runs, 3)
        self.run_tokens = buffer[at : (at := at + run_tokens)]
        self.sampling = buffer[at : (at := at + SAMPLING_WORDS * sampling)].reshape(sampling, SAMPLING_WORDS)
        self.suppress_runs = buffer[at : (at := at + 3 * suppress_runs)].reshape(suppress_runs, 3)
        self.suppress_ids = buffer[at : (at := at + suppress_ids)]
        self.extras = None if extras is None else PlanExtras(buffer[at:], extras)

    @property
    def step_id(self) -> int:
        return join64(self.buffer[H.STEP_ID_LOW], self.buffer[H.STEP_ID_HIGH])

    @property
    def flags(self) -> PlanFlags:
        return PlanFlags(int(self.buffer[H.FLAGS]))

    @property
    def is_decode_only(self) -> bool:
        return self.num_decode == self.num_rows

    def seal(self) -> StepPlan:
        """Write the checksum once every section is filled in. Returns self."""
        self.buffer[H.CHECKSUM] = checksum(self.buffer)
        return self

    @classmethod
    def decode(cls, data: bytes | memoryview | np.ndarray) -> StepPlan:
        """Check a received buffer and return its views.

        Raises:
            StepFormatError: wrong magic or version, wrong length, impossible counts, or a failed checksum.
        """
        buffer = as_words(data, HEADER_WORDS, PLAN_MAGIC, "plan")
        counts = buffer[_COUNTS].tolist()
        rows, padded_rows, decode, samples, tokens, padded_tokens, deltas, runs, run_tokens, sampling, srun, sids = (
            counts
        )
        if min(counts) < 0 or not (decode <= rows <= padded_rows and samples <= rows and tokens <= padded_tokens):
            raise StepFormatError(f"step plan has impossible counts {counts}")
        extras = ExtraCounts(*buffer[_EXTRA_COUNTS].tolist())
        if not extras.possible or (extras != _NO_EXTRAS and not buffer[H.FLAGS] & PlanFlags.EXTRAS):
            raise StepFormatError(f"step plan has impossible counts {extras}")
        words = plan_words(padded_rows, padded_tokens, deltas, runs, run_tokens, sampling, srun, sids) + extras.words
        if words != len(buffer):
            raise StepFormatError(f"step plan holds {len(buffer)} words, its counts need {words}")
        if buffer[H.CHECKSUM] != checksum(buffer):
            raise StepFormatError(
                f"step plan {join64(buffer[H.STEP_ID_LOW], buffer[H.STEP_ID_HIGH])} fails its checksum"
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
        low, high = split64(step_id)
        counts = (
            num_rows, padded_rows, num_decode, num_samples, num_tokens, padded_tokens,
            page_deltas, token_runs, run_tokens, sampling, suppress_runs, suppress_ids,
        )  # fmt: skip
        _HEADER.pack_into(buffer, 0, PLAN_MAGIC, words, 0, low, high, int(flags), *counts, *header_end)
        return StepPlan(buffer, counts, extras)
