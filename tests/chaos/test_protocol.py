"""Damaged messages and ranks of another version are refused by name, and streams go on with new ranks.

Real processes; ranks compute hashes instead of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from cluster import messages
from cluster.errors import StartupError
from cluster.progress import no_progress
from cluster.rank_startup import PendingStep, RankSpec, Runner, Startup
from cluster.recovery import StartBudget
from cluster.timeline import Timeline
from cluster.worker_group import WorkerGroup
from scheduler.step import StepPlan
from tests.integration.fakes import Faults
from tests.integration.test_liveness import Service, make_group

pytestmark = [pytest.mark.usefixtures("private_ray"), pytest.mark.timeout(300)]

FAILS_AT = 20  # the step that goes wrong, in the first group only


@contextmanager
def service(group: WorkerGroup):
    running = Service(group, budget=StartBudget(3, 600.0))
    try:
        yield running
    finally:
        running.driver.close()


def serve(service: Service) -> dict[int, list[int]]:
    for number in range(1, 5):
        service.submit(number, list(range(number, number + 30)), 60)
    return service.collect(4)


@pytest.fixture(scope="module")
def expected(private_ray) -> dict[int, list[int]]:
    with service(make_group()) as undisturbed:
        return serve(undisturbed)


def test_a_corrupted_plan(expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group()
    send = group.send_plan

    def send_plan(plan: StepPlan) -> None:
        if plan.step_id == FAILS_AT:
            damaged = plan.buffer.copy()
            damaged[-1] ^= 1
            send(SimpleNamespace(buffer=damaged))
        else:
            send(plan)

    monkeypatch.setattr(group, "send_plan", send_plan)
    with service(group) as disturbed:
        assert serve(disturbed) == expected
        (recovery,) = disturbed.driver.last_recoveries
        assert f"step plan {FAILS_AT} fails its checksum" in recovery.cause


@dataclass(frozen=True)
class Truncated:
    """Rank 0 sends half of a result, in the first group only: a later one starts with more tokens known."""

    def __call__(self, spec: RankSpec, startup: Startup) -> tuple[Runner, Callable[[], None]]:
        runner, barrier = Faults()(spec, startup)
        launch, steps = runner.launch, iter(range(1, 1 << 30))

        def cut(plan: StepPlan) -> PendingStep:
            pending = launch(plan)
            if next(steps) != FAILS_AT or plan.step_id != FAILS_AT:
                return pending
            raw = pending.result().encode()
            half = SimpleNamespace(encode=lambda: bytes(raw)[: len(bytes(raw)) // 2])
            return SimpleNamespace(result=lambda: half)

        if spec.worker.tp_rank == 0:
            runner.launch = cut
        return runner, barrier


def test_a_truncated_result(expected: dict[int, list[int]]) -> None:
    group = make_group()
    group.config = replace(group.config, make_runner=Truncated())
    with service(group) as disturbed:
        assert serve(disturbed) == expected
        (recovery,) = disturbed.driver.last_recoveries
        assert "rank 0 sent a damaged result" in recovery.cause


def test_a_rank_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PROTOCOL_VERSION", messages.PROTOCOL_VERSION + 1)  # of this process, not of ranks
    with pytest.raises(StartupError, match="all nodes need the same version of raydix"):
        make_group().start(Timeline(no_progress))
