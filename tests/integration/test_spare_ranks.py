"""Spare ranks take over in the same placement group; where they cannot, everything starts anew. Nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table

from cluster import spare_ranks
from cluster.recovery import StartBudget
from tests.integration.test_liveness import Service, make_group

pytestmark = [pytest.mark.usefixtures("private_ray"), pytest.mark.timeout(300)]


@contextmanager
def service(modules: tuple[str, ...] = ("json",)) -> Iterator[Service]:
    group = make_group()
    group.config = replace(group.config, spare_modules=modules)
    group = type(group)(group.config)
    running = Service(group, budget=StartBudget(9, 600.0))
    try:
        yield running
    finally:
        running.driver.close()


def until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill(running: Service, rank: int) -> None:
    """Kill a rank under streams; returns when they have ended well."""
    recoveries = running.driver.recoveries
    for number in range(1, 4):
        running.submit(100 * recoveries + number, list(range(number, number + 30)), 200)
    os.kill(running.group.info.ranks[rank].pid, signal.SIGKILL)
    assert all(len(tokens) == 200 for tokens in running.collect(3).values())
    assert running.driver.recoveries == recoveries + 1


def spare_pids(running: Service) -> set[int]:
    until(lambda: running.group.spares_ready)
    return {place.pid for place in ray.get(running.group._place._spares._prepared)}


def placement_groups() -> set[str]:
    return {name for name, entry in placement_group_table().items() if entry["state"] != "REMOVED"}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_ranks, "DELAY", 0.0)


@pytest.mark.usefixtures("at_once")
def test_spares_take_over_again_and_again() -> None:
    with service() as running:
        places = placement_groups()
        ended = set(running.pids)
        for rank in (1, 0, 1):
            spares = spare_pids(running)
            kill(running, rank)
            assert {place.pid for place in running.group.info.ranks} == spares
            assert "placement" not in running.driver.last_recoveries[-1].phases
            assert placement_groups() == places
            assert not any(psutil.pid_exists(pid) for pid in ended)
            ended |= spares
            ended -= {place.pid for place in running.group.info.ranks}
        ended |= spare_pids(running) | {place.pid for place in running.group.info.ranks}
    assert not any(psutil.pid_exists(pid) for pid in ended)
    assert not placement_groups() & places


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("broken", ["dead", "cannot import"])
def test_where_a_spare_is_of_no_use_everything_starts_anew(broken: str) -> None:
    with service(("json",) if broken == "dead" else ("no.such.module",)) as running:
        places = placement_groups()
        spares = spare_pids(running) if broken == "dead" else set()
        if spares:
            os.kill(max(spares), signal.SIGKILL)
        kill(running, 0)
        assert running.driver.last_recoveries[-1].starts == 1
        assert not {place.pid for place in running.group.info.ranks} & spares
        assert not placement_groups() & places
        until(lambda: not any(psutil.pid_exists(pid) for pid in spares))


def test_ranks_that_fail_before_there_are_spares_start_anew() -> None:
    with service() as running:
        kill(running, 1)
        assert "placement" in running.driver.last_recoveries[-1].phases


@pytest.mark.usefixtures("at_once")
def test_a_stop_while_spares_start_leaves_none() -> None:
    before = rank_processes()
    with service():
        time.sleep(0.3)
    until(lambda: rank_processes() <= before)


def rank_processes() -> set[int]:
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ended just now
            if process.name().startswith("ray::RankActor"):
                found.add(process.pid)
    return found
