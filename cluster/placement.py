"""Placement of a group: one bundle per rank, the driver's node first, as few nodes as possible, within a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from cluster.errors import PlacementError

_NEAR_TIMEOUT = 2.0  # for the driver's own node, which had room a moment ago
_NODE_ID_LABEL = "ray.io/node-id"


@dataclass(frozen=True, slots=True)
class Placement:
    """A reserved placement group. `bundles[rank]` is the rank's bundle index and `nodes[rank]` its node id.

    The group is not detached: Ray removes it when its creator, the driver, dies.
    """

    group: PlacementGroup
    bundles: tuple[int, ...]
    nodes: tuple[str, ...]

    def remove(self) -> None:
        """Give the resources back; kills whatever still runs in them. Safe to call twice."""
        remove_placement_group(self.group)


def place_ranks(
    tp_size: int,
    resources: dict[str, float],
    timeout: float,
    may_grow: bool = True,
    check: Callable[[], None] = lambda: None,
) -> Placement:
    """Reserve `tp_size` bundles of `resources` (such as {"GPU": 1.0}). `check` is called every second of waiting.

    All ranks go to the driver's node when it has room for all of them; otherwise Ray packs them on as few nodes as it
    can. Ranks are numbered node by node, the driver's node first.

    Raises:
        PlacementError: not reserved after `timeout` seconds, or at once if the group can never fit and no node can
            join (`may_grow` False). Nothing stays reserved then.
    """
    deadline = time.monotonic() + timeout
    driver_node = ray.get_runtime_context().get_node_id()
    if not may_grow and sum(_fits(node["Resources"], resources) for node in _alive_nodes()) < tp_size:
        raise PlacementError(describe_shortage(tp_size, resources, "the group can never fit"))
    if _fits(available_resources_per_node().get(driver_node, {}), resources) >= tp_size:
        near = [{_NODE_ID_LABEL: driver_node}] * tp_size
        group = _reserve(tp_size, resources, min(timeout, _NEAR_TIMEOUT), near, check)
        if group is not None:
            return _in_rank_order(group, driver_node)
    group = _reserve(tp_size, resources, deadline - time.monotonic(), None, check)
    if group is None:
        raise PlacementError(describe_shortage(tp_size, resources, f"not placed within {timeout:.0f} s"))
    return _in_rank_order(group, driver_node)


def describe_shortage(tp_size: int, resources: dict[str, float], problem: str) -> str:
    """What was asked, what each node has, and what would fit, as a short table."""
    names = list(resources)
    free = available_resources_per_node()
    nodes = _alive_nodes()
    lines = [f"{problem}: asked for {tp_size} x {_show(resources)}; the cluster has"]
    for node in nodes:
        now = free.get(node["NodeID"], {})
        have = ", ".join(
            f"{now.get(name, 0.0):g} of {node['Resources'].get(name, 0.0):g} {name} free" for name in names
        )
        lines.append(f"  {node['NodeManagerAddress']:15}  {have}")
    total = sum(_fits(node["Resources"], resources) for node in nodes)
    now = sum(_fits(free.get(node["NodeID"], {}), resources) for node in nodes)
    lines.append(f"tp_size up to {now} would fit now, up to {total} once everything else has ended")
    return "\n".join(lines)


def _reserve(
    tp_size: int,
    resources: dict[str, float],
    timeout: float,
    labels: list[dict[str, str]] | None,
    check: Callable[[], None],
) -> PlacementGroup | None:
    group = placement_group([dict(resources) for _ in range(tp_size)], strategy="PACK", bundle_label_selector=labels)
    deadline = time.monotonic() + timeout
    try:
        while (left := deadline - time.monotonic()) > 0:
            if group.wait(min(1.0, left)):  # short waits, so that Ctrl-C is heard
                return group
            check()
    except BaseException:
        remove_placement_group(group)
        raise
    remove_placement_group(group)
    return None


def _in_rank_order(group: PlacementGroup, driver_node: str) -> Placement:
    node_of = placement_group_table(group)["bundles_to_node_id"]
    bundles = sorted(node_of, key=lambda bundle: (node_of[bundle] != driver_node, node_of[bundle], bundle))
    return Placement(group, tuple(bundles), tuple(node_of[bundle] for bundle in bundles))


def _alive_nodes() -> list[dict]:
    return [node for node in ray.nodes() if node["Alive"]]


def _fits(have: dict[str, float], each: dict[str, float]) -> int:
    """How many bundles of `each` go into `have`. A bundle of less than one GPU has to lie on a single card."""
    counts = []
    for name, amount in each.items():
        room = have.get(name, 0.0) + 1e-6
        if name == "GPU" and amount < 1:
            counts.append(math.floor(room) * math.floor(1 / amount + 1e-6) + math.floor(room % 1.0 / amount))
        else:
            counts.append(math.floor(room / amount))
    return min(counts)


def _show(resources: dict[str, float]) -> str:
    return "{" + ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) + "}"
