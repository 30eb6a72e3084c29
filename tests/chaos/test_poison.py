"""Requests that break a rank whenever they run: they alone fail, after a bounded number of recoveries.

Real processes, no model: a rank that computes hashes starts in a fraction of the time, and checks every slot. Without
collectives rank 0 does not notice when rank 1 is broken, so it is rank 0 that breaks.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from cluster.errors import EngineDeadError, EngineError
from cluster.recovery import StartBudget
from scheduler.outputs import FinishReason, StepOutputs
from tests.chaos.faults import Poison
from tests.integration.fakes import Faults
from tests.integration.test_liveness import Service, make_group

pytestmark = [pytest.mark.usefixtures("private_ray"), pytest.mark.timeout(600)]

NEIGHBOURS = range(1, 16)
LENGTH = 300
POISON = (101, 102)  # the seed of `Service.submit` is the request's id


@contextmanager
def service(fault: Poison | Faults, starts: int = 4, step_timeout: float = 60.0) -> Iterator[Service]:
    group = make_group()
    group.config = replace(group.config, make_runner=fault)
    running = Service(group, step_timeout, budget=StartBudget(starts, 600.0))
    try:
        yield running
    finally:
        running.driver.close()


class Outputs:
    """What arrived, by request."""

    def __init__(self, arrivals: queue.SimpleQueue[StepOutputs | EngineError]) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.errors: dict[int, str] = {}
        self._arrivals = arrivals

    def take(self) -> None:
        arrival = self._arrivals.get(timeout=120)
        assert isinstance(arrival, StepOutputs), arrival
        self.errors |= arrival.errors
        columns = (arrival.request_ids.tolist(), arrival.tokens.tolist(), arrival.finish.tolist())
        for request_id, token, finish in zip(*columns, strict=True):
            assert request_id not in self.finish
            if token >= 0:
                self.tokens.setdefault(request_id, []).append(token)
            if finish:
                self.finish[request_id] = FinishReason(finish)

    def wait_for_tokens(self, ids: set[int]) -> None:
        while not self.tokens.keys() >= ids:
            self.take()

    def wait_for_ends(self, ids: set[int]) -> None:
        while not self.finish.keys() >= ids:
            self.take()


def submit_neighbours(running: Service) -> None:
    for number in NEIGHBOURS:
        running.submit(number, list(range(number, 3 * number + 20)), LENGTH)


@pytest.fixture(scope="module")
def expected(private_ray) -> dict[int, list[int]]:
    with service(Faults()) as running:
        outputs = Outputs(running.arrivals)
        submit_neighbours(running)
        outputs.wait_for_ends(set(NEIGHBOURS))
        return outputs.tokens


@pytest.mark.parametrize(
    ("tokens", "how"),
    [
        (0, "raise"),
        pytest.param(12, "raise", marks=pytest.mark.full_grid),
        (30, "die"),
        pytest.param(5, "hang", marks=pytest.mark.full_grid),
    ],
    ids=["its prompt", "its 12th token", "kills the process", "hangs"],
)
def test_the_poison_request_alone_fails_and_15_neighbours_complete(
    expected: dict[int, list[int]], tokens: int, how: str
) -> None:
    with service(Poison(POISON, 0, tokens, how, Faults()), step_timeout=5.0 if how == "hang" else 60.0) as running:
        outputs = Outputs(running.arrivals)
        submit_neighbours(running)
        outputs.wait_for_tokens({1, 2, 3})
        running.submit(POISON[0], list(range(7)), LENGTH)
        outputs.wait_for_ends({*NEIGHBOURS, POISON[0]})
        assert outputs.finish.pop(POISON[0]) == FinishReason.POISON
        assert "also when it runs alone" in outputs.errors[POISON[0]]
        assert len(outputs.tokens.pop(POISON[0], [])) in range(tokens - 2, tokens + 1)
        assert set(outputs.finish.values()) == {FinishReason.LENGTH}
        assert outputs.tokens == expected
        assert 3 <= running.driver.recoveries <= 4
        running.submit(200, [5, 6, 7], 20)  # nobody is held back
        outputs.wait_for_ends({200})


@pytest.mark.full_grid
def test_two_poison_requests_at_once(expected: dict[int, list[int]]) -> None:
    with service(Poison(POISON, 0, inner=Faults())) as running:
        outputs = Outputs(running.arrivals)
        submit_neighbours(running)
        outputs.wait_for_tokens({1})
        for number in POISON:
            running.submit(number, list(range(number)), LENGTH)
        outputs.wait_for_ends({*NEIGHBOURS, *POISON})
        assert [outputs.finish[number] for number in POISON] == [FinishReason.POISON] * 2
        assert {number: outputs.tokens[number] for number in NEIGHBOURS} == expected


def test_ranks_that_fail_whatever_runs_end_with_one_error_within_the_budget() -> None:
    with service(Poison((*NEIGHBOURS,), 0, inner=Faults()), starts=3) as running:
        submit_neighbours(running)
        error = running.failure(240)
        assert isinstance(error, EngineDeadError)
        assert "RuntimeError: forward failed; given up after 3 starts within 600 s" in str(error)
        assert running.driver.recoveries == 3
