"""Whether nodes may still join a Ray cluster, as its autoscaler reports it.

Ray runs an autoscaler process on every cluster; on one that was started by hand it adds nothing and only reports.
Version 2 (what `ray up` and KubeRay start) tells Ray's control store which placement groups none of its node types
can hold, and which nodes are on their way. Version 1 writes a status, from which only its presence can be read.
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
    way, or it does not say that none of its node types can hold the group."""
    state = _status().autoscaling_state
    if not state.autoscaler_state_version:
        return _version_1_adds_nodes()
    if state.pending_instances or state.pending_instance_requests:
        return True
    return not any(request.details.startswith(group_id) for request in state.infeasible_gang_resource_requests)


def _status() -> Any:
    reply = GetClusterStatusReply()
    reply.ParseFromString(_control_store().get_cluster_status())
    return reply


def _version_1_adds_nodes() -> bool:
    """On a cluster without an autoscaler, version 1 makes up a node type for each node, named after the node."""
    written = _control_store().internal_kv_get(ray_constants.DEBUG_AUTOSCALING_STATUS.encode(), None)
    if written is None:
        return False
    report = json.loads(written).get("autoscaler_report") or {}
    made_up = {f"node_{node['NodeID']}" for node in ray.nodes()}
    return not set(report.get("active_nodes") or {}) <= made_up


def _control_store() -> Any:
    return ray._private.worker.global_worker.gcs_client
