"""The driver loop's end, without ranks."""

from __future__ import annotations

import threading

from cluster.driver import Driver
from cluster.errors import EngineDeadError


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
