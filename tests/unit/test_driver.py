"""The driver loop's end, and whom it takes for hung, without ranks."""

from __future__ import annotations

import threading

import pytest

from cluster.driver import Driver
from cluster.errors import EngineDeadError
from cluster.messages import Pong
from cluster.recovery import StartBudget
from scheduler.fake_model import FakeModel
from scheduler.fake_worker import FakeWorker
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.scheduler import Scheduler
from scheduler.step import StepPlan, StepResult
from tests.unit.scheduler_harness import make_config, make_request


class NoGroup:
    size = 1

    def wake(self) -> None: ...

    def settled(self) -> None: ...

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


class MortalRank(NoGroup):
    """Dies before its sixth step, and is quick to start again; writes down what it hears, and how many tokens had been
    handed out then."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self.heard: list[tuple[str, int]] = []
        self._steps = 0
        self.stop_ranks()

    def start(self, _timeline: object, _check: object) -> None:
        self.heard.append(("start", len(self._tokens)))

    def stop_ranks(self) -> None:
        self._worker = FakeWorker(make_config(), FakeModel(1000))
        self._answers: list[StepResult] = []

    def settled(self) -> None:
        self.heard.append(("settled", len(self._tokens)))

    def send_plan(self, plan: StepPlan) -> None:
        self._steps += 1
        if self._steps == 6:
            raise EngineDeadError("it died")
        self._answers.append(self._worker.execute(StepPlan.decode(plan.buffer.copy())))

    def poll(self, timeout: float) -> list[StepResult]:
        answers, self._answers = self._answers, []
        return answers


def test_a_group_is_settled_once_every_interrupted_stream_goes_on():
    """One that is aborted meanwhile is waited for no more."""
    tokens: list[int] = []
    ended = threading.Event()

    def on_outputs(outputs: StepOutputs) -> None:
        tokens.extend(outputs.request_ids[outputs.tokens >= 0].tolist())
        if len(tokens) == 3:
            driver.post(lambda: scheduler.abort(3))
        if sum(outputs.finish == FinishReason.LENGTH) and tokens.count(1) == tokens.count(2) == 8:
            ended.set()

    scheduler = Scheduler(make_config(overlap_depth=1, max_step_tokens=16))
    for number in (1, 2, 3):
        scheduler.add(make_request(number, [number] * 4, max_tokens=8))
    group = MortalRank(tokens)
    driver = Driver(group, scheduler, TIMEOUT, 0, on_outputs, pytest.fail, StartBudget(2, 600.0))
    driver.start()
    assert ended.wait(60)
    driver.close()
    (first, _), (start, before), (second, after) = group.heard
    assert (first, start, second) == ("settled", "start", "settled")
    assert {1, 2} <= set(tokens[before:after])
