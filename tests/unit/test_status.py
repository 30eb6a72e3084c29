"""What `raydix status` shows of what replicas report, without a cluster."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from cluster import status
from cluster.cli.status import render, serves, watch
from cluster.status import ApplicationStatus, ReplicaStatus, rate

INFO = {
    "served_model_name": "m",
    "driver_pid": 11,
    "ranks": [{"node_ip": "10.0.0.1", "pid": 21, "gpu_ids": ("0",)}, {"node_ip": "10.0.0.2", "pid": 22, "gpu_ids": ()}],
}
METRICS = {
    "running": 3, "waiting": 0, "total_pages": 100, "free_pages": 20, "evictable_pages": 30, "cached_tokens": 60,
    "prefilled_tokens": 40, "generation_tokens": 1000, "preemptions": 0, "recoveries": 2,
}  # fmt: skip


def application(*replicas: ReplicaStatus, **fields: Any) -> ApplicationStatus:
    deployments = {"engine": ("HEALTHY", {"RUNNING": len(replicas)})}
    return ApplicationStatus("raydix", "RUNNING", "", deployments, list(replicas), **fields)


def replica(name: str, tokens: int, seen: float, problem: str | None = None) -> ReplicaStatus:
    return ReplicaStatus(name, "10.0.0.1", INFO, METRICS | {"generation_tokens": tokens}, problem, seen)


def shown(*looks: list[ApplicationStatus]) -> str:
    output = io.StringIO()
    Console(file=output, width=200).print(render(looks[0], looks[-1]))
    return output.getvalue()


def test_shares() -> None:
    one = replica("a", 0, 0.0)
    assert (one.kv_use, one.hit_rate) == (0.5, 0.6)
    silent = ReplicaStatus("a", "10.0.0.1", INFO, {}, "gone", 0.0)
    assert (silent.kv_use, silent.hit_rate) == (0.0, 0.0)


def test_rates_are_of_the_same_replica() -> None:
    before = [application(replica("a", 100, 1.0), replica("b", 500, 1.0))]
    now = [application(replica("a", 300, 3.0), replica("c", 900, 3.0))]
    assert rate(before, now, "generation_tokens") == {"a": 100.0}
    restarted = [application(replica("a", 10, 5.0))]
    assert rate(now, restarted, "generation_tokens") == {"a": 0}


def test_what_is_shown() -> None:
    text = shown([application(replica("a", 100, 1.0))], [application(replica("a", 300, 2.0))])
    for part in ("raydix RUNNING: engine 1 running", "200", "50%", "60%", "10.0.0.2", "none"):
        assert part in text, text


def test_what_does_not_serve_is_said() -> None:
    sick = application(replica("a", 0, 1.0, "no step has finished for 40 s"), silent=["actor died"])
    assert not serves(sick)
    assert serves(application(replica("a", 0, 1.0)))
    assert "a: no step has finished for 40 s" in shown([sick])
    assert "actor died" in shown([sick])


def test_watching_ends_with_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([[application(replica("a", 300, 2.0))]])

    def collect(timeout: float) -> list[ApplicationStatus]:
        try:
            return next(looks)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(status, "collect", collect)
    with pytest.raises(KeyboardInterrupt):
        watch([application(replica("a", 100, 1.0))], 0.01)
