"""`Watchdog`: how long an answer may take before a rank counts as hung. `Probe`: who answers while no step runs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from cluster.messages import Pong
from scheduler.step import StepPlan

# Attention to this many positions costs about what the rest of the model does for a token.
_ATTENTION_TOKENS = 4096
_LEAST_WORK = 32.0  # tokens; smaller steps say nothing of what a token costs
_UNKNOWN_PACE = 0.05  # seconds per token, before any step was measured: a slow CPU
_SLACK = 10.0  # a step may be so many times slower than those before it
_FORGET = 0.98  # per measured step: a slow time is forgotten in the end


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A plan that was sent. `work` is tokens; `kind` what steps with the same kernels and sizes have in common."""

    step_id: int
    sent: float
    work: float
    kind: tuple[int, ...]


class Watchdog:
    """What the ranks have to answer, and until when: the oldest step in flight, or else the probe.

    A probe has `step_timeout` seconds. A step has that, and on top of it time in proportion to its work, at a pace
    learnt from the steps before it. The first of its kind on these ranks has `compile_timeout` more: its kernels may
    have to be compiled. Times are `time.monotonic()`.
    """

    def __init__(self, step_timeout: float, compile_timeout: float = 0.0) -> None:
        self.in_flight: deque[StepInFlight] = deque()  # oldest first
        self.probe: Probe | None = None
        self._step_timeout = step_timeout
        self._compile_timeout = compile_timeout
        self._pace: float | None = None  # seconds per token of the slower steps lately
        self._known: set[tuple[int, ...]] = set()
        self.expected = 0.0  # seconds that the oldest step in flight should take, as those before it did

    def sent(self, plan: StepPlan, now: float) -> None:
        self.in_flight.append(StepInFlight(plan.step_id, now, _work(plan), _kind(plan)))
        self._expect()

    def answered(self, now: float, last_progress: float) -> float:
        """The oldest step has its answer. Returns the seconds that it took, from when it could begin."""
        step = self.in_flight.popleft()
        seconds = now - max(step.sent, last_progress)
        if step.kind in self._known and step.work >= _LEAST_WORK:
            self._pace = max(seconds / step.work, (self._pace or 0.0) * _FORGET)
        self._known.add(step.kind)
        self._expect()
        return seconds

    def forget(self) -> None:
        """The ranks are new: nothing is awaited, and nothing compiled."""
        self.in_flight.clear()
        self.probe = None
        self._known.clear()
        self._expect()

    def deadline(self, last_progress: float) -> float:
        """Until when the answer that is awaited has time. The one before it, at `last_progress`, restarts the clock: a
        step may have waited for another."""
        sent = self.in_flight[0].sent if self.in_flight else self.probe.sent
        return max(sent, last_progress) + self.allowed()

    def hang(self) -> str:
        """What to say of an answer that is late."""
        what = f"step {self.in_flight[0].step_id}" if self.in_flight else "an idle probe"
        return f"no answer to {what} for {self.allowed():.0f} s (step_timeout {self._step_timeout:g}): a rank hangs" + (
            f"; {self.probe}" if self.probe is not None else ""
        )

    def allowed(self) -> float:
        """Seconds that the oldest step in flight may take, or the probe if there is none."""
        if not self.in_flight:
            return self._step_timeout
        step = self.in_flight[0]
        pace = _UNKNOWN_PACE if self._pace is None else _SLACK * self._pace
        first = 0.0 if step.kind in self._known else self._compile_timeout
        return self._step_timeout + pace * step.work + first

    def _expect(self) -> None:
        pace = _UNKNOWN_PACE if self._pace is None else self._pace
        self.expected = pace * self.in_flight[0].work if self.in_flight else 0.0


def _work(plan: StepPlan) -> float:
    reach = plan.device_len[: plan.num_rows].astype(np.float64)
    new = reach - plan.cached_len[: plan.num_rows]
    return plan.num_tokens + float(new @ reach) / _ATTENTION_TOKENS


def _kind(plan: StepPlan) -> tuple[int, ...]:
    return (
        plan.num_decode > 0,
        plan.num_rows > plan.num_decode,
        plan.padded_rows.bit_length(),
        plan.padded_tokens.bit_length(),
        int(plan.flags),
    )


class Probe:
    """A `Ping` on its way: which ranks have not answered."""

    def __init__(self, number: int, ranks: int, sent: float) -> None:
        self.sent = sent
        self._number = number
        self._missing = set(range(ranks))

    def answered(self, rank: int, pong: Pong) -> bool:
        """Note an answer; True when it was the last one missing."""
        if pong.number == self._number:
            self._missing.discard(rank)
        return not self._missing

    def __str__(self) -> str:
        return f"ranks that did not answer: {', '.join(map(str, sorted(self._missing)))}"
