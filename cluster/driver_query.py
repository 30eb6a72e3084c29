"""`ask_driver`: a question that only the driver's thread can answer, since it alone may look at the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from typing import TypeVar

from cluster.driver import Driver

Answer = TypeVar("Answer")

_TIMEOUT = 5.0  # seconds


def ask_driver(driver: Driver, ask: Callable[[], Answer]) -> Answer | None:
    """What `ask` says in the driver's thread; None if the driver has ended or does not answer in time.

    What `ask` raises is raised here, and does not end the driver loop.
    """
    if driver.failure is not None:
        return None
    answer: Future[Answer] = Future()

    def tell() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    driver.post(tell)
    try:
        return answer.result(_TIMEOUT)
    except TimeoutError:
        return None
