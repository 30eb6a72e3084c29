"""Whether what replicas will ask for fits on the nodes that a cluster file allows: places all of it, on paper."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from cluster.validate.source import Path

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class NodeType:
    """Nodes of one kind. `resources` is None where the file does not say; `present` are there before any demand."""

    name: str
    resources: dict[str, float] | None
    present: int
    most: int


@dataclass(frozen=True, slots=True)
class Nodes:
    """All nodes that can exist: at most `max_nodes` together, the head node included."""

    types: tuple[NodeType, ...]
    max_nodes: int

    @property
    def gpus_present(self) -> float:
        return sum(kind.present * (kind.resources or {}).get("GPU", 0) for kind in self.types)

    @property
    def has_gpus(self) -> bool:
        return any((kind.resources or {}).get("GPU", 0) for kind in self.types)


@dataclass(frozen=True, slots=True)
class Group:
    """`count` bundles of `resources`, on one node if there is one for all of them, else on several."""

    count: int
    resources: dict[str, float]


@dataclass(frozen=True, slots=True)
class Demand:
    """What one deployment asks for: `replicas` times its groups. Problems are reported at `path`."""

    name: str
    path: Path
    replicas: int
    groups: tuple[Group, ...]


@dataclass(slots=True)
class _Node:
    kind: NodeType
    free: dict[str, float]
    cards: list[float] = field(default_factory=list)

    @classmethod
    def new(cls, kind: NodeType) -> _Node:
        return cls(kind, dict(kind.resources or {}), [1.0] * int((kind.resources or {}).get("GPU", 0)))

    def take(self, resources: dict[str, float], times: int) -> int:
        """Reserve up to `times` bundles; returns how many there was room for."""
        for done in range(times):
            if not self._take_one(resources):
                return done
        return times

    def _take_one(self, resources: dict[str, float]) -> bool:
        if any(self.free.get(name, 0.0) + _EPSILON < amount for name, amount in resources.items()):
            return False
        gpus = resources.get("GPU", 0.0)
        if gpus and not self._take_cards(gpus):
            return False
        for name, amount in resources.items():
            self.free[name] -= amount
        return True

    def _take_cards(self, amount: float) -> bool:
        """A share of a GPU lies on one card; more than one GPU is whole cards."""
        if amount < 1:
            room = [index for index, card in enumerate(self.cards) if card + _EPSILON >= amount]
            if not room:
                return False
            self.cards[min(room, key=lambda index: self.cards[index])] -= amount  # the fullest that has room
            return True
        whole = [index for index, card in enumerate(self.cards) if card > 1 - _EPSILON]
        if len(whole) < math.ceil(amount):
            return False
        for index in whole[: math.ceil(amount)]:
            self.cards[index] = 0.0
        return True


def place(nodes: Nodes, demands: list[Demand]) -> tuple[dict[str, int], Demand | None, str]:
    """Place all demands; larger groups first, GPUs before CPUs.

    Returns:
        Nodes in use by type; the demand that does not fit, or None; and why it does not.
    """
    there = [_Node.new(kind) for kind in nodes.types for _ in range(kind.present)]
    groups = [
        (demand, group) for demand in demands for group in demand.groups for _ in range(demand.replicas)
    ]  # one entry per group and replica
    groups.sort(key=lambda entry: (-entry[1].resources.get("GPU", 0.0), -entry[1].count))
    used: set[int] = set()
    for demand, group in groups:
        if _largest(nodes, group.resources) == 0:
            return {}, demand, f"no node type has room for a bundle of {show(group.resources)}: {describe(nodes)}"
        if not _place_group(nodes, there, group, used):
            return {}, demand, _shortage(nodes, demands, group)
    return dict(Counter(there[index].kind.name for index in sorted(used))), None, ""


def _place_group(nodes: Nodes, there: list[_Node], group: Group, used: set[int]) -> bool:
    left = group.count
    one_node = _largest(nodes, group.resources) >= left
    while left:
        order = sorted(range(len(there)), key=lambda index: _waste(there[index], group.resources))
        for index in order:
            node = there[index]
            if one_node and _room(node, group.resources) < left:
                continue
            if taken := node.take(group.resources, left):
                used.add(index)
                left -= taken
            if not left:
                return True
        new = _launch(nodes, there, group.resources, left)
        if new is not None:
            there.append(new)
        elif one_node:
            one_node = False  # no node has room for all of it any more
        else:
            return False
    return True


def _launch(nodes: Nodes, there: list[_Node], resources: dict[str, float], count: int) -> _Node | None:
    """One more node: of the smallest type that takes all `count` bundles, else of the one that takes most."""
    counts = Counter(node.kind.name for node in there)
    if len(there) >= nodes.max_nodes:
        return None
    kinds = [kind for kind in nodes.types if counts[kind.name] < kind.most and _room(_Node.new(kind), resources)]
    if not kinds:
        return None
    return _Node.new(
        min(kinds, key=lambda kind: (-min(count, _room(_Node.new(kind), resources)), sum(kind.resources.values())))
    )


def _waste(node: _Node, resources: dict[str, float]) -> tuple[float, float]:
    """Order of preference: nodes without GPUs for bundles without, then the fullest."""
    gpu_wasted = node.free.get("GPU", 0.0) if "GPU" not in resources else 0.0
    return gpu_wasted, sum(node.free.values())


def _room(node: _Node, resources: dict[str, float]) -> int:
    return _Node(node.kind, dict(node.free), list(node.cards)).take(resources, 10_000)


def _largest(nodes: Nodes, resources: dict[str, float]) -> int:
    return max((_room(_Node.new(kind), resources) for kind in nodes.types if kind.most), default=0)


def _shortage(nodes: Nodes, demands: list[Demand], group: Group) -> str:
    name = "GPU" if "GPU" in group.resources else next(iter(group.resources))
    asked = sum(
        demand.replicas * each.count * each.resources.get(name, 0.0) for demand in demands for each in demand.groups
    )
    return f"all replicas together ask for {asked:g} {name}, which do not fit: {describe(nodes)}"


def describe(nodes: Nodes) -> str:
    """What the cluster file allows, in one line."""
    kinds = [f"{kind.most} x {kind.name} {show(kind.resources or {})}" for kind in nodes.types if kind.most]
    return f"the cluster has at most {' and '.join(kinds)}, {nodes.max_nodes} nodes in all"


def show(resources: dict[str, float]) -> str:
    """`{1 GPU, 4 CPU}`."""
    return "{" + ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) + "}"
