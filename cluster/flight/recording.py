"""A recording and its file.

The file, little-endian: 8 bytes of magic with the format's version, the header's length and CRC-32 (uint32 each), the
header (msgpack), and int32 words: snapshot plans, then each step's plan and result, in the order of the header's table
of lengths. Nothing in it is unpickled. Plans and results carry checksums of their own; the words as a whole have one in
the header, so that a file that was cut or damaged is refused.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from cluster.errors import RecordingError
from scheduler.snapshot import LiveRow, missing_prefixes, snapshot_plans
from scheduler.step import StepFormatError, StepPlan, StepResult

MAGIC = b"RDXFLT"
FORMAT = 1
_PREAMBLE = struct.Struct("<6sHII")
KEPT_FILES = 16
"""Recordings in one directory; the oldest go."""


class RecordedStep:
    """One step: its plan's words; `time.monotonic()` when it was sent and answered (None: never); its tokens."""

    __slots__ = ("answered", "buffer", "prompts", "sent", "tokens")

    def __init__(
        self, buffer: np.ndarray, sent: float, prompts: dict[int, np.ndarray],
        tokens: np.ndarray | None = None, answered: float | None = None,
    ) -> None:  # fmt: skip
        self.buffer = buffer
        self.sent = sent
        self.prompts = prompts  # known tokens of the rows that it admits
        self.tokens = tokens  # int32[num_samples]; None: not answered, or not recorded
        self.answered = answered

    @property
    def plan(self) -> StepPlan:
        return StepPlan(self.buffer)


@dataclass
class Recording:
    """The last steps of an engine and what its rows held before them.

    created     UTC, ISO 8601
    engine      settings that fresh workers need, under their names in `EngineConfig`
    rows        before the first step; of a recording that was read they are in `snapshot`
    snapshot    plans that bring fresh workers to the first step
    broken      why there is no snapshot
    """

    reason: str
    created: str
    with_tokens: bool
    engine: dict[str, Any]
    rows: list[LiveRow]
    steps: list[RecordedStep]
    snapshot: list[StepPlan] = field(default_factory=list)
    broken: str | None = None

    def write(self, path: Path) -> None:
        """Make the file, readable by its owner only. Raises OSError."""
        self._make_snapshot()
        buffers = [plan.buffer for plan in self.snapshot]
        table = []
        for step in self.steps:
            plan, answered, result_words = step.plan, step.answered, 0
            buffers.append(step.buffer)
            if answered is not None:
                tokens = np.zeros(plan.num_samples, np.int32) if step.tokens is None else step.tokens
                buffers.append(StepResult(plan.step_id, tokens).encode())
                result_words = len(buffers[-1])
            table.append([len(step.buffer), result_words, step.sent, answered])
        words = np.concatenate([np.empty(0, np.int32), *buffers]).astype("<i4", copy=False)
        header = {
            "raydix": version("raydix"), "reason": self.reason, "created": self.created,
            "with_tokens": self.with_tokens, "engine": self.engine, "broken": self.broken,
            "snapshot": [len(plan.buffer) for plan in self.snapshot], "steps": table,
            "words": len(words), "crc": zlib.crc32(words.data.cast("B")),
        }  # fmt: skip
        packed = msgpack.packb(header)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(_PREAMBLE.pack(MAGIC, FORMAT, len(packed), zlib.crc32(packed)))
            file.write(packed)
            file.write(words.data)

    def _make_snapshot(self) -> None:
        if not self.steps or self.snapshot or self.broken is not None:
            return
        first, size = self.steps[0].plan.step_id, self.engine["page_size"]
        try:
            steps = ((step.plan, step.prompts) for step in self.steps)
            prefixes = missing_prefixes(self.rows, steps, size)
            self.snapshot = snapshot_plans(first - 1, prefixes, self.rows, size, self.engine["max_step_tokens"])
            if not self.with_tokens:
                for plan in self.snapshot:
                    strip_tokens(plan.buffer)
        except Exception as error:  # the state may be what is broken; the steps are worth a file all the same
            self.broken = f"{type(error).__name__}: {error}"


def strip_tokens(buffer: np.ndarray) -> None:
    """Zeros instead of all token ids of a plan, and of its masks."""
    plan = StepPlan(buffer)
    plan.run_tokens[:] = 0
    plan.suppress_ids[:] = 0
    if (extras := plan.extras) is not None:
        for ids in (extras.history_tokens, extras.bias_ids, extras.score_targets, extras.masks):
            ids[:] = 0
    plan.seal()


def read_recording(path: Path) -> Recording:
    """The recording in a file.

    Raises:
        RecordingError: it cannot be read, is no recording, of another version, cut short or damaged; says which.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        return _parse(data)
    except RecordingError as error:
        raise RecordingError(f"{path}: {error}") from error
    except (StepFormatError, ValueError, TypeError, KeyError) as error:
        raise RecordingError(f"{path}: the recording is damaged: {error}") from error


def _parse(data: bytes) -> Recording:
    if len(data) < _PREAMBLE.size or not data.startswith(MAGIC):
        raise RecordingError("this is no recording of raydix's flight recorder")
    _, form, length, crc = _PREAMBLE.unpack_from(data)
    if form != FORMAT:
        raise RecordingError(f"the recording has format {form}, this raydix reads format {FORMAT}")
    packed = data[_PREAMBLE.size : _PREAMBLE.size + length]
    if len(packed) < length:
        raise RecordingError(f"the recording is cut short: its header has {length} bytes, {len(packed)} are there")
    if zlib.crc32(packed) != crc:
        raise RecordingError("the recording is damaged: its header fails the checksum")
    header = msgpack.unpackb(packed)
    body = data[_PREAMBLE.size + length :]
    if len(body) != 4 * header["words"]:
        raise RecordingError(f"the recording is cut short: {len(body)} bytes of steps, {4 * header['words']} expected")
    if zlib.crc32(body) != header["crc"]:
        raise RecordingError("the recording is damaged: its steps fail the checksum")
    words, at = np.frombuffer(body, "<i4").astype(np.int32), 0

    def take(count: int) -> np.ndarray:
        nonlocal at
        at += count
        return words[at - count : at]

    snapshot = [StepPlan.decode(take(count)) for count in header["snapshot"]]
    steps = []
    for plan, result, sent, answered in header["steps"]:
        step = RecordedStep(StepPlan.decode(take(plan)).buffer, sent, {}, None, answered)
        if result:
            step.tokens = StepResult.decode(take(result)).tokens
        steps.append(step)
    return Recording(
        header["reason"], header["created"], header["with_tokens"], header["engine"], [], steps, snapshot,
        header["broken"],
    )  # fmt: skip


def write_into(directory: Path, recording: Recording) -> Path:
    """A new file for `recording`; the oldest of more than `KEPT_FILES` go. Raises RecordingError."""
    stamp = recording.created.replace(":", "").replace("-", "").partition("+")[0]
    path = directory / f"flight-{stamp}-{os.getpid()}.rdx"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        recording.write(path)
        for old in sorted(directory.glob("flight-*.rdx"))[:-KEPT_FILES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise RecordingError(f"cannot write into {directory}: {error.strerror or error}") from error
    return path
