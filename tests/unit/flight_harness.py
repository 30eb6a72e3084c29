"""A scheduler harness with a flight recorder, and a group of one rank that computes hashes."""

from __future__ import annotations

from pathlib import Path

from cluster.flight import FlightRecorder, Recording, read_recording
from cluster.flight.replay import Outcome, find_wrong_slot, replay
from scheduler.config import SchedulerConfig
from scheduler.fake_model import FakeModel
from scheduler.fake_worker import FakeWorker
from scheduler.step import StepPlan, StepResult
from tests.unit.scheduler_harness import Harness


def engine_of(config: SchedulerConfig) -> dict[str, object]:
    names = ("num_pages", "page_size", "max_running_requests", "max_seq_len", "max_step_tokens")
    return {name: getattr(config, name) for name in names}


class RecordedHarness(Harness):
    """Records as the driver does."""

    def __init__(
        self, config: SchedulerConfig, model: FakeModel | None = None, *, late: bool = False, steps: int = 8,
        with_tokens: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(config, model, late=late)
        self.recorder = FlightRecorder(self.scheduler, steps, with_tokens, engine_of(config), Path())

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            self.recorder.plan(plan)
        return plan

    def deliver(self) -> bool:
        if self.in_flight:
            plan, result, executed = self.in_flight[0]
            if result is None:
                result = self.worker.execute(StepPlan.decode(plan.buffer))
                self.in_flight[0] = plan, result, executed
            self.recorder.result(result)
        return super().deliver()

    def recover(self) -> None:
        super().recover()
        self.recorder.restart()

    def recording(self, directory: Path) -> Recording:
        """Written to a file and read again."""
        path = directory / "flight.rdx"
        self.recorder.take("a test").write(path)
        return read_recording(path)

    def replayed(self, recording: Recording) -> Outcome:
        return replay(recording, HashGroup(self.config, self.model), 10.0)

    def check(self, directory: Path) -> Recording:
        """What is recorded now has no wrong slot, and gives the same tokens again."""
        recording = self.recording(directory)
        assert recording.broken is None, recording.broken
        assert find_wrong_slot(recording) is None
        if recording.with_tokens and recording.steps:
            outcome = self.replayed(recording)
            assert outcome.first is None, outcome.first
            assert outcome.steps == sum(step.tokens is not None for step in recording.steps)
        return recording


class HashGroup:
    """One rank without a process."""

    def __init__(self, config: SchedulerConfig, model: FakeModel) -> None:
        self._worker = FakeWorker(config, model)
        self._results: list[StepResult] = []

    def send_plan(self, plan: StepPlan) -> None:
        self._results.append(self._worker.execute(plan))

    def poll(self, timeout: float | None) -> list[StepResult]:
        results, self._results = self._results, []
        return results
