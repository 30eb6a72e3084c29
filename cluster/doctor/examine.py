"""The examination: connect, ask every node, measure every pair. Each wait has a deadline: it ends on a sick one too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray._raylet import AuthenticationMode, get_authentication_mode
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster import ray_runtime
from cluster.doctor import judge
from cluster.doctor.facts import NodeFacts
from cluster.doctor.findings import AllReduce, Finding
from cluster.doctor.probe import Probe
from cluster.errors import RaydixError
from cluster.progress import Progress, no_progress
from cluster.ray_errors import explain

_CLOCK_ROUNDS = 5


@dataclass(slots=True)
class _Node:
    """A node and its probes: one without a GPU, and one for each of up to two GPUs that are free."""

    node_id: str
    ip: str
    resources: dict[str, float]
    probe: Any = None
    gpu_probes: tuple[Any, ...] = ()


def examine(
    address: str = "auto", model: str | None = None, timeout: float = 60.0, progress: Progress = no_progress
) -> list[Finding]:
    """Examine the Ray cluster at `address` (see `ray_runtime.connect`).

    Args:
        model: a directory or hub id that must be readable on every node.
        timeout: deadline in seconds for each step: for the nodes' answers, and for each round of pairs.

    Returns:
        Findings in the order in which a person would look.
    """
    progress("connecting to Ray", 0.0)
    try:
        runtime = ray_runtime.connect(address, min_cpus=1)
    except RaydixError as error:
        return [judge.unreachable(address, error)]
    try:
        return list(_examine(runtime, model, timeout, progress))
    finally:
        runtime.close()


def _examine(
    runtime: ray_runtime.RayRuntime, model: str | None, timeout: float, progress: Progress
) -> Iterator[Finding]:
    all_nodes = ray.nodes()
    yield judge.connection(all_nodes, runtime.may_grow)
    if runtime.may_grow:
        yield judge.authentication(get_authentication_mode() != AuthenticationMode.DISABLED)
    nodes = [_Node(n["NodeID"], n["NodeManagerAddress"], n["Resources"]) for n in all_nodes if n["Alive"]]
    actor = ray.remote(Probe)
    for node in nodes:
        node.probe = _start(actor, node, num_gpus=0)
    progress("asking every node", 0.0)
    answers, missing = _gather({node.node_id: node.probe.facts.remote(model) for node in nodes}, timeout)
    names = _names(nodes)
    for node in nodes:
        if node.node_id in missing:
            yield judge.silent(names[node.node_id], missing[node.node_id], timeout)
    well = [node for node in nodes if node.node_id in answers]
    facts: dict[str, NodeFacts] = {names[node.node_id]: answers[node.node_id] for node in well}
    yield from judge.versions(facts)
    yield from judge.gpus(facts, {names[node.node_id]: node.resources for node in well})
    yield from judge.shared_memory(facts)
    yield from judge.limits(facts)
    if model is not None:
        yield from judge.model(model, facts)
    progress("comparing clocks", 0.0)
    yield from judge.clocks(_skews(well, names, timeout))
    yield from _measure("gloo", well, names, timeout, progress)
    free = available_resources_per_node()
    for node in well:
        spare = int(free.get(node.node_id, {}).get("GPU", 0.0))
        node.gpu_probes = tuple(_start(actor, node, num_gpus=1) for _ in range(min(spare, 2)))
    if any(node.resources.get("GPU") for node in well):
        yield from judge.busy_gpus([names[n.node_id] for n in well if n.resources.get("GPU") and not n.gpu_probes])
        yield from _measure("nccl", well, names, timeout, progress)
    for node in nodes:
        for probe in (node.probe, *node.gpu_probes):
            ray.kill(probe)


def _start(actor: Any, node: _Node, num_gpus: int) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    return actor.options(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=strategy, max_restarts=0).remote()


def _names(nodes: list[_Node]) -> dict[str, str]:
    """Nodes by their addresses; by address and id where several share one."""
    ips = [node.ip for node in nodes]
    return {node.node_id: node.ip if ips.count(node.ip) == 1 else f"{node.ip} {node.node_id[:6]}" for node in nodes}


def _gather(calls: dict[Any, Any], timeout: float) -> tuple[dict[Any, Any], dict[Any, str | None]]:
    """Results by key, and for the keys without one, why not; None: it did not answer in time."""
    ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout) if calls else None
    results, missing = {}, {}
    for key, call in calls.items():
        try:
            results[key] = ray.get(call, timeout=0.0)
        except ray.exceptions.GetTimeoutError:
            missing[key] = None
        except ray.exceptions.RayError as error:
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) and error.cause else None
            missing[key] = str(cause) if cause is not None else explain(error)
    return results, missing


def _skews(nodes: list[_Node], names: dict[str, str], timeout: float) -> dict[str, tuple[float, float]]:
    """Seconds by which each node's clock is ahead of this one's, and how far that may be off."""
    found = {}
    for node in nodes:
        for _ in range(_CLOCK_ROUNDS):
            start = time.time()
            try:
                there = ray.get(node.probe.now.remote(), timeout=timeout)
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                break
            trip = time.time() - start
            if node.node_id not in found or trip / 2 < found[node.node_id][1]:
                found[node.node_id] = (there - start - trip / 2, trip / 2)
    return {names[node_id]: skew for node_id, skew in found.items()}


def _measure(
    backend: str, nodes: list[_Node], names: dict[str, str], timeout: float, progress: Progress
) -> Iterator[Finding]:
    """All-reduce of every two nodes, and with NCCL of two cards of each node. A probe is in one pair at a time."""
    if backend == "gloo":
        seats = [(names[node.node_id], node.probe) for node in nodes]
        rounds = list(pairings(seats))
    else:
        seats = [(names[node.node_id], node.gpu_probes[0]) for node in nodes if node.gpu_probes]
        inside = [
            ((names[n.node_id], n.gpu_probes[0]), (names[n.node_id], n.gpu_probes[1]))
            for n in nodes
            if len(n.gpu_probes) == 2
        ]
        rounds = ([inside] if inside else []) + list(pairings(seats))
    rounds = [pairs for pairs in rounds if pairs]
    if not rounds:
        return
    _gather({name: probe.prepare.remote() for name, probe in seats}, timeout)
    done, total = 0, sum(map(len, rounds))
    for pairs in rounds:
        progress(f"measuring {total} pairs with {backend}", done / total)
        for (first, second), result in _run_round(backend, pairs, timeout):
            yield judge.pair(backend, first, second, result)
        done += len(pairs)


def _run_round(
    backend: str, pairs: list[tuple[tuple[str, Any], tuple[str, Any]]], timeout: float
) -> Iterator[tuple[tuple[str, str], AllReduce | str]]:
    """Pairs that have no probe in common, all at once."""
    places, failed = _gather({index: first[1].open_store.remote() for index, (first, _) in enumerate(pairs)}, timeout)
    calls = {}
    for index, (host, port) in places.items():
        for rank, (_, probe) in enumerate(pairs[index]):
            calls[index, rank] = probe.all_reduce.remote(rank, host, port, backend, timeout)
    results, missing = _gather(calls, 2 * timeout)  # connecting and measuring have `timeout` each
    for index, ((first, _), (second, _)) in enumerate(pairs):
        problems = [missing[index, rank] or "no answer" for rank in (1, 0) if (index, rank) in missing]
        if index in failed:
            problems = [failed[index] or "no answer"]
        yield (first, second), problems[0] if problems else results[index, 0]


def pairings(seats: list[Any]) -> Iterator[list[tuple[Any, Any]]]:
    """Every two of `seats` once, in rounds in which each sits in at most one pair (a round-robin tournament)."""
    ring: list[Any] = list(seats) if len(seats) % 2 == 0 else [*seats, None]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(first, second) for first, second in pairs if first is not None and second is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]
