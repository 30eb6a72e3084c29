"""What Ray's autoscaler reports, and what it means for a group that waits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

from cluster import autoscaler

GROUP = "83df0a947fb2c1b4c6d63b6ae59401000000"


class Store:
    """Ray's control store, as far as it is asked."""

    def __init__(self, reply: GetClusterStatusReply, written: dict[str, Any] | None = None) -> None:
        self._reply = reply
        self._written = written

    def get_cluster_status(self) -> bytes:
        return self._reply.SerializeToString()

    def internal_kv_get(self, key: bytes, namespace: Any) -> bytes | None:
        return None if self._written is None else json.dumps(self._written).encode()


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch):
    """Sets what the store holds; the cluster has one node, of id "abc"."""
    monkeypatch.setattr(autoscaler.ray, "nodes", lambda: [{"NodeID": "abc"}])
    return lambda *store: monkeypatch.setattr(autoscaler, "_control_store", lambda: Store(*store))


def version_2(infeasible: str = "", pending: bool = False, node_type: str = "worker") -> GetClusterStatusReply:
    reply = GetClusterStatusReply()
    reply.autoscaling_state.autoscaler_state_version = 7
    reply.cluster_resource_state.node_states.add(ray_node_type_name=node_type)
    if infeasible:
        reply.autoscaling_state.infeasible_gang_resource_requests.add(details=f"{infeasible}:PACK|PENDING")
    if pending:
        reply.autoscaling_state.pending_instances.add(instance_id="1")
    return reply


@pytest.mark.parametrize(
    ("reply", "may_come", "adds"),
    [
        (version_2(), True, True),
        (version_2(infeasible=GROUP), False, True),
        (version_2(infeasible="another"), True, True),
        (version_2(infeasible=GROUP, pending=True), True, True),  # a node of the `local` provider, its size unknown
        (version_2(infeasible=GROUP, node_type=""), False, False),
    ],
)
def test_version_2(reports, reply: GetClusterStatusReply, may_come: bool, adds: bool) -> None:
    reports(reply)
    assert autoscaler.may_come(GROUP) == may_come
    assert autoscaler.adds_nodes() == adds


@pytest.mark.parametrize(
    ("report", "may_come", "adds"),
    [
        (None, False, False),
        ({"active_nodes": {"node_abc": 1}}, False, False),
        ({"active_nodes": {"ray.head.default": 1}}, False, True),
        ({"active_nodes": {"ray.head.default": 1}, "pending_nodes": [["10.0.0.2", "gpu", "waiting"]]}, True, True),
        ({"active_nodes": {"ray.head.default": 1}, "pending_launches": {"gpu": 2}}, True, True),
    ],
)
def test_version_1(reports, report: dict[str, Any] | None, may_come: bool, adds: bool) -> None:
    reports(GetClusterStatusReply(), {"autoscaler_report": report})
    assert autoscaler.may_come(GROUP) == may_come
    assert autoscaler.adds_nodes() == adds


def test_without_an_autoscaler_process(reports) -> None:
    reports(GetClusterStatusReply())
    assert not autoscaler.may_come(GROUP) and not autoscaler.adds_nodes()
