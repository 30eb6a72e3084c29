"""Placement on a private Ray: where ranks go, and clear errors within a bound where they cannot."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import ray

from cluster import autoscaler
from cluster.errors import PlacementError
from cluster.placement import _fits, place_ranks
from cluster.progress import no_progress
from cluster.timeline import Timeline
from cluster.worker_group import WorkerGroup
from tests.integration.fakes import fake_group_config

pytestmark = pytest.mark.usefixtures("private_ray")


def wait_for_free_cpus(count: float) -> None:
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < count:
        assert time.monotonic() < deadline, "resources did not come back"
        time.sleep(0.05)


def test_ranks_go_to_the_drivers_node_in_order() -> None:
    placement = place_ranks(3, {"CPU": 1.0}, timeout=60)
    here = ray.get_runtime_context().get_node_id()
    assert placement.nodes == (here,) * 3
    assert sorted(placement.bundles) == [0, 1, 2]
    placement.remove()
    placement.remove()
    wait_for_free_cpus(8)


def test_what_can_never_fit_fails_at_once_on_a_cluster_that_cannot_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.placement._reserve", lambda *_: pytest.fail("waited for what cannot come"))
    with pytest.raises(PlacementError) as error:
        place_ranks(4, {"GPU": 1.0}, timeout=60, may_grow=False)
    message = str(error.value)
    assert "4 x {1 GPU}" in message and "0 of 0 GPU free" in message and "tp_size up to 0" in message


def test_what_can_never_fit_fails_soon_where_no_autoscaler_adds_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.placement._JOIN_GRACE", 2.0)
    assert not autoscaler.adds_nodes()
    with pytest.raises(PlacementError, match="no autoscaler adds nodes") as error:
        place_ranks(9, {"CPU": 1.0}, timeout=60)
    assert "9 x {1 CPU}" in str(error.value) and "up to 8 once" in str(error.value)
    wait_for_free_cpus(8)


def test_what_does_not_fit_now_fails_within_the_bound_and_keeps_nothing() -> None:
    first = place_ranks(6, {"CPU": 1.0}, timeout=60)
    with pytest.raises(PlacementError, match=r"not placed within 2 s.*\n.*2 of 8 CPU free") as error:
        place_ranks(4, {"CPU": 1.0}, timeout=2)
    assert "tp_size up to 2 would fit now, up to 8" in str(error.value)
    first.remove()
    wait_for_free_cpus(8)


def test_it_waits_for_room_that_comes() -> None:
    first = place_ranks(6, {"CPU": 1.0}, timeout=60)
    first.remove()  # asynchronous: the next one may have to wait for it
    second = place_ranks(8, {"CPU": 1.0}, timeout=60)
    second.remove()
    wait_for_free_cpus(8)


def test_a_group_that_does_not_fit_leaves_nothing_behind() -> None:
    group = WorkerGroup(replace(fake_group_config(9), placement_timeout=5.0))
    with pytest.raises(PlacementError, match="9 x"):
        group.start(Timeline(no_progress))
    wait_for_free_cpus(8)


@pytest.mark.parametrize(
    ("have", "each", "count"),
    [
        ({"CPU": 4.0}, {"CPU": 1.0}, 4),
        ({"GPU": 2.0}, {"GPU": 1.0}, 2),
        ({"GPU": 1.0}, {"GPU": 0.5}, 2),
        ({"GPU": 2.0}, {"GPU": 0.4}, 4),  # two on each card: a bundle cannot be spread over two
        ({"GPU": 1.5}, {"GPU": 0.5}, 3),
        ({}, {"GPU": 1.0}, 0),
    ],
)
def test_bundles_that_fit(have: dict[str, float], each: dict[str, float], count: int) -> None:
    assert _fits(have, each) == count
