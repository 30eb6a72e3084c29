"""One replica in virtual time: the real Scheduler, a worker that says how long each step took, and a clock."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from cluster.simulate.cost_model import StepCost, StepShape
from cluster.simulate.metrics import Recorder, Totals
from cluster.simulate.tokens import stream_seeds, stream_tokens
from kvcache import PrefixDigest
from scheduler.config import SchedulerConfig
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.step import S, StepPlan, StepResult

_WORD, _WORD_BITS = np.uint64(0xFFFFFFFF), np.uint64(32)


class TimedWorker(Protocol):
    """Executes plans in order; `host_seconds` as in `StepCost`."""

    host_seconds: float

    def execute(self, plan: StepPlan) -> tuple[StepResult, float]:
        """The step's result, and the seconds from its start to its end."""
        ...


class ScriptedWorker:
    """Generates what the trace says, after the time that the cost model says.

    A request's output is the token stream (`tokens`) whose key is its seed, so a later turn of its conversation finds
    its answer in the prefix cache as it would in life.
    """

    def __init__(self, cost: StepCost, max_running_requests: int, vocab_size: int) -> None:
        self.host_seconds = cost.host_seconds
        self._cost = cost
        self._vocab_size = vocab_size
        self._seeds = np.zeros(max_running_requests + 1, dtype=np.uint64)
        self._prompt_len = np.zeros(max_running_requests + 1, dtype=np.int64)

    def execute(self, plan: StepPlan) -> tuple[StepResult, float]:
        if len(plan.sampling):
            words = plan.sampling.astype(np.int64)
            rows = words[:, S.ROW]
            low, high = (words[:, column].astype(np.uint64) & _WORD for column in (S.SEED_LOW, S.SEED_HIGH))
            self._seeds[rows] = stream_seeds(low | high << _WORD_BITS)
            self._prompt_len[rows] = words[:, S.PROMPT_LEN]
        sample = plan.sample[: plan.num_samples]
        rows = plan.rows[sample]
        positions = plan.device_len[sample] - self._prompt_len[rows]
        tokens = stream_tokens(self._seeds[rows], positions, self._vocab_size)
        return StepResult(plan.step_id, tokens), self._cost.seconds(StepShape.of(plan))


class SimulatedEngine:
    """Events of one replica. As in the driver, a step is planned as soon as fewer than `overlap_depth` are in flight,
    and steps run one after the other.

    With a `digest`, the prefix cache keeps it up to date for a router.
    """

    def __init__(
        self, config: SchedulerConfig, worker: TimedWorker, recorder: Recorder, digest: PrefixDigest | None = None
    ) -> None:
        self.scheduler = Scheduler(config, digest)
        self.digest = digest
        self._worker = worker
        self._recorder = recorder
        self._arrivals: deque[tuple[float, Request]] = deque()
        self._in_flight: deque[tuple[float, StepResult]] = deque()  # (when it ends, what it gives)
        self._busy_until = 0.0
        self.now = 0.0

    def submit(self, time: float, request: Request) -> None:
        """`request` arrives at `time`, not before those submitted earlier. Raises InvalidRequest if it cannot run."""
        self.scheduler.validate(request)
        self._arrivals.append((time, request))

    @property
    def next_event(self) -> float:
        """When the next result or arrival is due; infinite when idle."""
        arrival = self._arrivals[0][0] if self._arrivals else np.inf
        return min(arrival, self._in_flight[0][0]) if self._in_flight else arrival

    def run_until(self, end: float) -> None:
        """Everything that happens before `end`."""
        scheduler = self.scheduler
        while (event := self.next_event) < end:
            self.now = max(self.now, event)
            while self._arrivals and self._arrivals[0][0] <= self.now:
                scheduler.add(self._arrivals.popleft()[1])
            if self._in_flight and self._in_flight[0][0] <= self.now:
                self._recorder.record(self.now, scheduler.process(self._in_flight.popleft()[1]))
            while (plan := scheduler.schedule()) is not None:
                result, seconds = self._worker.execute(plan)
                self._busy_until = max(self._busy_until, self.now + self._worker.host_seconds) + seconds
                self._in_flight.append((self._busy_until, result))
            self._recorder.record(self.now, scheduler.take_outputs())

    def totals(self) -> Totals:
        stats = self.scheduler.stats()
        return Totals(stats.prefilled_tokens, stats.cached_tokens, stats.preemptions, stats.steps)
