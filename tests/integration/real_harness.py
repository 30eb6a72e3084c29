"""`RealHarness`: the scheduler tests' harness with real ranks where the fake worker was."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.fake_model import FakeModel
from scheduler.outputs import FinishReason
from scheduler.step import S, StepPlan, StepResult
from tests.alone import Alone
from tests.integration.shared_group import TIMEOUT, SharedGroup
from tests.unit.scheduler_harness import Harness, Stream


class RankResult:
    """A result that may still be on its way from the ranks. Must be encoded in step order."""

    def __init__(self, worker: RankWorker, step_id: int) -> None:
        self.step_id = step_id
        self._worker = worker

    def encode(self) -> np.ndarray:
        result = self._worker.next_result()
        assert result.step_id == self.step_id
        return result.encode()


class RankWorker:
    """What `Harness` asks of a worker, done by a group: plans are sent when made, results awaited when wanted."""

    def __init__(self, group: SharedGroup, config: SchedulerConfig) -> None:
        self._group = group
        self._size = config.page_size
        self._arrived: deque[StepResult] = deque()
        self._page_table = np.full((config.max_running_requests + 1, config.max_seq_len), -1, dtype=np.int32)

    def execute(self, plan: StepPlan) -> RankResult:
        self._group.group.send_plan(plan)
        self._page_table[plan.sampling[:, S.ROW]] = -1
        rows, positions, starts = plan.page_deltas.T
        self._page_table[rows, positions // self._size] = starts
        return RankResult(self, plan.step_id)

    def slots(self, row: int, first: int, end: int) -> np.ndarray:
        positions = np.arange(first, end)
        return self._page_table[row, positions // self._size] + positions % self._size

    def next_result(self) -> StepResult:
        deadline = time.monotonic() + TIMEOUT
        while not self._arrived:
            assert time.monotonic() < deadline, f"no result within {TIMEOUT} s"
            arrived = self._group.group.poll(TIMEOUT)  # returns early, and empty, when something woke it
            self._arrived += [item for item in arrived if isinstance(item, StepResult)]
        return self._arrived.popleft()


class RealHarness(Harness):
    """Drives `Scheduler` against the ranks of `group`; every output must be what `alone` gives."""

    def __init__(self, group: SharedGroup, alone: Alone, config: SchedulerConfig) -> None:
        self._group = group
        self._alone = alone
        group.usable = False
        self.in_flight = deque()
        super().__init__(config, FakeModel())

    def _fresh_worker(self) -> None:
        """After a recovery these ranks go on, but what they hold and what they were doing is forgotten."""
        for _, result, _ in self.in_flight:
            result.encode()
        self.worker = RankWorker(self._group, self.config)
        self.in_flight = deque()

    def finish(self) -> None:
        super().finish()
        self._group.usable = True

    def _check_stream(self, stream: Stream) -> None:
        request, tokens = stream.request, stream.tokens
        if stream.finish == FinishReason.ABORT:
            assert stream.aborted, f"request {request.request_id} was aborted by nobody"
        elif stream.finish == FinishReason.INVALID:
            stored = len(request.prompt_ids) + len(self._alone.run(request).tokens) - 1
            capacity = self.config.num_pages * self.config.page_size
            assert stored > capacity, f"request {request.request_id} failed ({stream.error}), but fits"
        else:
            assert stream.finish != FinishReason.NONE, f"request {request.request_id} never finished"
            self._alone.compare(request, tokens, stream.finish)
            return
        self._alone.compare(request, tokens)
