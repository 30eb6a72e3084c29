"""Whether nodes may still join a Ray cluster, as its autoscaler reports it.

Ray runs an autoscaler process on every cluster; on one that was started by hand it adds nothing and only reports.
Both versions of it say which nodes are on their way; version 2 (the default of `ray up`) also which placement groups
none of its node types can hold.
"""

from __future__ import annotations

import json
from typing import Any

import ray
from ray._private import ray_constants
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply


def adds_nodes() -> bool:
    """Whether this cluster has an autoscaler that can add nodes."""
    status = _status()
    if status.autoscaling_state.autoscaler_state_version:
        return any(node.ray_node_type_name for node in status.cluster_resource_state.node_states)
    return _version_1_adds_nodes()


def may_come(group_id: str) -> bool:
    """Whether the autoscaler may still make room for a pending placement group (its id in hex): nodes are on their
    way, or version 2 does not say that none of its node types can hold the group."""
    state = _status().autoscaling_state
    if not state.autoscaler_state_version:
        report = _version_1_report()
        return bool(report.get("pending_nodes") or report.get("pending_launches"))
    if state.pending_instances or state.pending_instance_requests:
        return True
    return not any(request.details.startswith(group_id) for request in state.infeasible_gang_resource_requests)


def _status() -> Any:
    reply = GetClusterStatusReply()
    reply.ParseFromString(_control_store().get_cluster_status())
    return reply


def _version_1_adds_nodes() -> bool:
    """On a cluster without an autoscaler, version 1 makes up a node type for each node, named after the node."""
    made_up = {f"node_{node['NodeID']}" for node in ray.nodes()}
    return not set(_version_1_report().get("active_nodes") or {}) <= made_up


def _version_1_report() -> dict[str, Any]:
    written = _control_store().internal_kv_get(ray_constants.DEBUG_AUTOSCALING_STATUS.encode(), None)
    return {} if written is None else json.loads(written).get("autoscaler_report") or {}


def _control_store() -> Any:
    return ray._private.worker.global_worker.gcs_client
