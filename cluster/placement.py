"""Placement of a group: one bundle per rank, the driver's node first, as few nodes as possible, within a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from cluster import autoscaler
from cluster.errors import PlacementError

_NEAR_TIMEOUT = 2.0  # for the driver's own node, which had room a moment ago
# A group that no set of today's nodes can hold is given up after this time without a sign of more nodes. Nodes of a
# cluster that was just started join one after the other; an autoscaler looks every 5 seconds.
_JOIN_GRACE = 15.0
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
        PlacementError: not reserved after `timeout` seconds; earlier if no set of nodes can hold the group: at once
            where no node can join (`may_grow` False), else when for some time no node has joined and no autoscaler is
            about to add one. Nothing stays reserved then.
    """
    deadline = time.monotonic() + timeout
    driver_node = ray.get_runtime_context().get_node_id()
    if not may_grow and _capacity(resources) < tp_size:
        raise PlacementError(describe_shortage(tp_size, resources, "the group can never fit"))
    if _fits(available_resources_per_node().get(driver_node, {}), resources) >= tp_size:
        near = [{_NODE_ID_LABEL: driver_node}] * tp_size
        group = _reserve(tp_size, resources, min(timeout, _NEAR_TIMEOUT), near, lambda _: check())
        if group is not None:
            return _in_rank_order(group, driver_node)
    hope = _Hope(tp_size, resources)

    def check_hope(group: PlacementGroup) -> None:
        check()
        hope.check(group)

    group = _reserve(tp_size, resources, deadline - time.monotonic(), None, check_hope)
    if group is None:
        raise PlacementError(describe_shortage(tp_size, resources, f"not placed within {timeout:.0f} s"))
    return _in_rank_order(group, driver_node)


def alive_node_ids() -> set[str]:
    """Ids of the nodes that Ray believes to be alive."""
    return {node["NodeID"] for node in _alive_nodes()}


class _Hope:
    """Whether a group that does not fit may fit later."""

    def __init__(self, tp_size: int, resources: dict[str, float]) -> None:
        self._tp_size = tp_size
        self._resources = resources
        self._nodes: set[str] = set()
        self._since = time.monotonic()  # of the last sign of more nodes

    def check(self, group: PlacementGroup) -> None:
        """Raises PlacementError when there is none left. To be called every second or so."""
        nodes = alive_node_ids()
        grown = not nodes <= self._nodes
        self._nodes = nodes
        if grown or _capacity(self._resources) >= self._tp_size or autoscaler.may_come(group.id.hex()):
            self._since = time.monotonic()
        elif time.monotonic() - self._since >= _JOIN_GRACE:
            cause = "no autoscaler adds nodes to this cluster"
            if autoscaler.adds_nodes():
                cause = "none of the autoscaler's node types, within its limits, can hold it"
            problem = f"the group does not fit and {cause}"
            raise PlacementError(describe_shortage(self._tp_size, self._resources, problem))


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
    now = sum(_fits(free.get(node["NodeID"], {}), resources) for node in nodes)
    lines.append(f"tp_size up to {now} would fit now, up to {_capacity(resources)} once everything else has ended")
    return "\n".join(lines)


def _reserve(
    tp_size: int,
    resources: dict[str, float],
    timeout: float,
    labels: list[dict[str, str]] | None,
    check: Callable[[PlacementGroup], None],
) -> PlacementGroup | None:
    group = placement_group([dict(resources) for _ in range(tp_size)], strategy="PACK", bundle_label_selector=labels)
    deadline = time.monotonic() + timeout
    try:
        while (left := deadline - time.monotonic()) > 0:
            if group.wait(min(1.0, left)):  # short waits, so that Ctrl-C is heard
                return group
            check(group)
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


def _capacity(each: dict[str, float]) -> int:
    """How many bundles of `each` all nodes together can hold when nothing else runs."""
    return sum(_fits(node["Resources"], each) for node in _alive_nodes())


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
