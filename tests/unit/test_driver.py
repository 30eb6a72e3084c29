"""The driver loop's end, and whom it takes for hung, without ranks."""

from __future__ import annotations

import threading

import pytest

from cluster.driver import Driver
from cluster.errors import EngineDeadError
from cluster.messages import Pong
from scheduler.fake_model import FakeModel
from scheduler.fake_worker import FakeWorker
from scheduler.outputs import StepOutputs
from scheduler.scheduler import Scheduler
from scheduler.step import StepPlan, StepResult
from tests.unit.scheduler_harness import make_config, make_request


class NoGroup:
    size = 1

    def wake(self) -> None: ...

    def stop(self, grace: float = 1.0) -> None: ...


class BrokenScheduler:
    has_work = True

    def schedule(self):
        raise OverflowError("of the plan")


def fail() -> None:
    raise IndexError("of a scheduler that an error left half-way")


def test_commands_behind_one_that_fails_after_the_end_are_answered():
    failures: list[Exception] = []
    answered = threading.Event()
    driver: Driver

    def on_failure(error: Exception) -> None:
        failures.append(error)
        driver.post(fail)
        driver.post(answered.set)

    driver = Driver(NoGroup(), BrokenScheduler(), 60.0, 0, lambda outputs: None, on_failure)
    driver.start()
    driver.close()
    assert answered.is_set()
    assert [type(error) for error in failures] == [EngineDeadError] and "OverflowError: of the plan" in str(failures[0])


TIMEOUT = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class PromptRank(NoGroup):
    """Has each step's answer at once, up to `silent_from`."""

    def __init__(self, clock: Clock, silent_from: int) -> None:
        self._clock = clock
        self._worker = FakeWorker(make_config(), FakeModel(1000))
        self._silent_from = silent_from
        self._answers: list[StepResult | tuple[int, Pong]] = []

    def send_plan(self, plan: StepPlan) -> None:
        if plan.step_id < self._silent_from:
            self._answers.append(self._worker.execute(StepPlan.decode(plan.buffer.copy())))

    def ping(self, number: int) -> None:
        self._answers.append((0, Pong(number)))

    def poll(self, timeout: float) -> list[StepResult | tuple[int, Pong]]:
        answers, self._answers = self._answers, []
        if not answers:
            self._clock.now += timeout
        return answers


class SlowScheduler(Scheduler):
    clock: Clock

    def schedule(self) -> StepPlan | None:
        self.clock.now += 100 * TIMEOUT
        return super().schedule()


@pytest.mark.parametrize("silent_from", [1, 4, 100])
def test_only_a_rank_that_sent_nothing_is_hung_however_long_the_driver_plans(monkeypatch, silent_from):
    monkeypatch.setattr("cluster.driver.time", clock := Clock())
    ended, failures, tokens = threading.Event(), [], []

    def on_outputs(outputs: StepOutputs) -> None:
        tokens.extend(outputs.tokens.tolist())
        if len(tokens) == 6:
            ended.set()

    def on_failure(error: Exception) -> None:
        failures.append(str(error))
        ended.set()

    scheduler = SlowScheduler(make_config(overlap_depth=1))
    scheduler.clock = clock
    scheduler.add(make_request(1, [1, 2, 3], max_tokens=6))
    driver = Driver(PromptRank(clock, silent_from), scheduler, TIMEOUT, 0, on_outputs, on_failure)
    driver.start()
    assert ended.wait(60)
    if silent_from < 6:
        assert len(tokens) == silent_from - 1 and f"no answer to step {silent_from} for" in failures[0]
    else:
        assert not failures
        driver.close()
