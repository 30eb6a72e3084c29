"""A deadline for calls without one."""

from __future__ import annotations

import threading

import pytest

from cluster.deadline import within


def test_a_call_in_time_has_its_effect_and_its_error() -> None:
    done: list[int] = []
    within(5.0, lambda: done.append(1))
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 / 0)


def test_a_call_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        within(0.05, release.wait)
    assert not release.is_set()
    release.set()
