"""The policy by itself; `tests/integration/test_scaling.py` runs it in Serve."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.serve.config import AutoscalingConfig

from cluster.serve.autoscaling import METRIC, OutstandingTokens


def decide(*tokens: float, queued: float = 0.0, target: float = 1000.0, running: int | None = None) -> float:
    running = len(tokens) if running is None else running
    metrics = {METRIC: {f"r{number}": value for number, value in enumerate(tokens)}} if tokens else {}
    context = SimpleNamespace(aggregated_metrics=metrics, total_queued_requests=queued, current_num_replicas=running)
    return OutstandingTokens(target)(context)[0]


def test_replicas_for_the_work_there_is() -> None:
    assert decide(500, 2500) == 3
    assert decide(0, 0) == 0
    assert decide() == 0


def test_requests_without_a_replica_wake_one() -> None:
    assert decide(queued=0.2) == 1
    assert decide(5000, queued=3) == 5


def test_nothing_shrinks_while_a_replica_is_silent() -> None:
    assert decide(100, running=2) == 2
    assert decide(running=1) == 1
    assert decide(9000, running=2) == 9


@pytest.mark.parametrize("target", [0, -1, float("nan")])
def test_impossible_targets(target: float) -> None:
    with pytest.raises(ValueError, match="target"):
        OutstandingTokens(target)


def test_serve_takes_it_by_name() -> None:
    policy = {"policy_function": "cluster.serve.autoscaling:OutstandingTokens", "policy_kwargs": {"target": 5}}
    config = AutoscalingConfig(min_replicas=0, max_replicas=3, policy=policy)
    assert config.policy.get_policy().__name__ == "OutstandingTokens"
