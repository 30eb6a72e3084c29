"""`FlightRecorder`: a bounded ring of the last step plans and results, in the driver's memory.

The ring is two segments. Each begins with the rows that lived between two steps, so whatever is forgotten before it,
its steps can be run again; when the younger one is full, the older one goes and a new one begins.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from cluster.flight.recording import RecordedStep, Recording, strip_tokens, write_into
from scheduler.scheduler import Scheduler
from scheduler.snapshot import LiveRow
from scheduler.step import S, StepPlan, StepResult

logger = logging.getLogger(__name__)

MAX_WORDS = 16 << 20
"""Of all plans and prompts in the ring, int32: what bounds it where steps are long."""
_SHORTEST = 4  # steps of a segment: when it is full, the results of the steps before it have arrived
_WRITE_TIMEOUT = 30.0  # seconds; a few hundred megabytes at most
_NO_PROMPTS: dict[int, np.ndarray] = {}


class _Segment:
    def __init__(self, rows: list[LiveRow], waiting: int) -> None:
        self.rows = rows
        self.waiting = waiting  # steps before it whose results have not arrived
        self.steps: list[RecordedStep] = []
        self.words = 0


class NoRecorder:
    """A recorder that is switched off."""

    def restart(self) -> None: ...
    def plan(self, plan: StepPlan) -> None: ...
    def result(self, result: StepResult) -> None: ...
    def save(self, reason: str) -> None: ...
    def close(self) -> None: ...


class FlightRecorder:
    """Records what the driver sends and gets. One thread owns it, the scheduler's.

    Args:
        steps: the ring holds the last `steps` or somewhat fewer, at least half of them; 8 at least.
        with_tokens: also prompts and sampled tokens, without which a recording shows shapes, slots and times only.
        engine: settings of `EngineConfig` that fresh workers need, as plain values.
        directory: where `save` makes its files.
    """

    def __init__(
        self, scheduler: Scheduler, steps: int, with_tokens: bool, engine: dict[str, Any], directory: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._scheduler = scheduler
        self._half = max(steps // 2, _SHORTEST)
        self._with_tokens = with_tokens
        self._engine = engine
        self.directory = directory
        self._clock = clock
        self._writers: list[threading.Thread] = []
        self._unanswered: deque[RecordedStep] = deque()
        self.restart()

    def restart(self) -> None:
        """The workers are new: what was recorded leads to nothing they hold."""
        self._unanswered.clear()
        self._older: _Segment | None = None
        self._current = _Segment([], 0)

    def plan(self, plan: StepPlan) -> None:
        """Record a sealed plan, before the next is planned."""
        segment, buffer, prompts = self._current, plan.buffer.copy(), _NO_PROMPTS
        segment.words += len(buffer)
        if len(plan.token_runs) or plan.extras is not None:
            if not self._with_tokens:
                strip_tokens(buffer)
            elif len(plan.sampling):
                prompts = self._scheduler.known_tokens(plan.sampling[:, S.ROW].tolist())
                segment.words += sum(map(len, prompts.values()))
        step = RecordedStep(buffer, self._clock(), prompts)
        segment.steps.append(step)
        self._unanswered.append(step)
        full = len(segment.steps) >= _SHORTEST and segment.words >= MAX_WORDS // 2
        if full or len(segment.steps) >= self._half:
            rows = self._scheduler.live_rows(self._with_tokens)
            self._older, self._current = segment, _Segment(rows, len(self._unanswered))

    def result(self, result: StepResult) -> None:
        """Record the result of the oldest plan without one."""
        step = self._unanswered.popleft()
        if self._with_tokens:
            step.tokens = result.tokens.copy()
        step.answered = self._clock()  # last: another thread may be writing the ring to a file
        segment = self._current
        if segment.waiting:
            segment.waiting -= 1
            self._complete(segment.rows, StepPlan(step.buffer), result.tokens)

    def take(self, reason: str) -> Recording:
        """What the ring holds now. Steps that are being run get their results later, if they do."""
        segments = [self._current] if self._older is None else [self._older, self._current]
        steps = [step for segment in segments for step in segment.steps]
        created = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        return Recording(reason, created, self._with_tokens, self._engine, segments[0].rows, steps)

    def save(self, reason: str) -> None:
        """Write a file, if there is anything to write, in a thread of its own: a failure is being dealt with.

        A failure to write is logged.
        """
        recording = self.take(reason)
        if recording.steps:
            writer = threading.Thread(target=self._write, args=(recording,), name="flight-recorder", daemon=True)
            self._writers = [other for other in self._writers if other.is_alive()] + [writer]
            writer.start()

    def close(self) -> None:
        """Wait until what was saved is in its file."""
        for writer in self._writers:
            writer.join(_WRITE_TIMEOUT)

    def _write(self, recording: Recording) -> None:
        try:
            path = write_into(self.directory, recording)
            logger.warning("the last %d steps are in %s", len(recording.steps), path)
        except Exception:
            logger.exception("the last steps could not be saved")

    def _complete(self, rows: list[LiveRow], plan: StepPlan, tokens: np.ndarray) -> None:
        by_row = {row.row: row for row in rows}
        sampled = plan.sample[: plan.num_samples]
        columns = plan.rows[sampled].tolist(), plan.device_len[sampled].tolist(), tokens.tolist()
        for number, position, token in zip(*columns, strict=True):
            if number in by_row:
                by_row[number].learn(position, token)
