"""A group's actors in their bundles: all where they were placed, or none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.errors import StartupError
from cluster.placement import Placement, alive_node_ids, place_ranks
from cluster.rank_actor import RankActor
from cluster.rank_startup import Whereabouts
from cluster.ray_errors import explain
from cluster.timeline import Timeline

logger = logging.getLogger(__name__)

_NODE_DEATH_GRACE = 1.0  # between an actor's death and the report that its node is gone


@dataclass(frozen=True, slots=True)
class RankActors:
    """One actor per rank; `places[rank]` is where it runs."""

    placement: Placement
    actors: list[ray.actor.ActorHandle]
    places: tuple[Whereabouts, ...]


def start_rank_actors(
    tp_size: int,
    resources: dict[str, float],
    placement_timeout: float,
    deadline: float,
    may_grow: bool,
    timeline: Timeline,
    check: Callable[[], None],
) -> RankActors:
    """Reserve a place for every rank and start its actor there.

    A node may be lost between the two. Ray would then move single bundles, out of rank order, or wait for ever; so the
    whole group is given back and placed again, until `placement_timeout` seconds have passed. `deadline` is
    `time.monotonic()`; `check` is called about every second of waiting, and gives up by raising.

    Raises:
        PlacementError: no room. StartupError: an actor failed for another reason. Nothing is left behind then.
    """
    began = time.monotonic()
    while True:
        timeline.enter("placement")
        left = max(0.0, began + placement_timeout - time.monotonic())
        placement = place_ranks(tp_size, resources, left, may_grow, check)
        timeline.enter("actors")
        actors = [start_actor(placement, bundle, resources) for bundle in placement.bundles]
        try:
            places = find_actors(placement, [actor.whereabouts.remote() for actor in actors], deadline, check)
        except BaseException:
            _give_back(placement, actors)
            raise
        if places is not None:
            return RankActors(placement, actors, places)
        logger.warning("a node was lost while the ranks were being placed on it; they are placed again")
        _give_back(placement, actors)


def start_actor(placement: Placement, bundle: int, resources: dict[str, float]) -> ray.actor.ActorHandle:
    """An actor that takes `resources` of a bundle, {} for none."""
    others = dict(resources)
    num_cpus, num_gpus = others.pop("CPU", 0), others.pop("GPU", 0)
    options = ray.remote(RankActor).options(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        resources=others or None,
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement.group, bundle),
    )
    return options.remote()


def find_actors(
    placement: Placement, answers: list[ray.ObjectRef], deadline: float, check: Callable[[], None]
) -> tuple[Whereabouts, ...] | None:
    """Where every actor runs, which are their answers; None if that is not where it was placed, or a node was lost.

    Raises:
        StartupError: an actor failed, or did not start until `deadline`.
    """
    waiting = answers
    while waiting:
        check()
        if time.monotonic() >= deadline:
            rank = answers.index(waiting[0])
            raise StartupError(f"the process of rank {rank} did not start in time (start_timeout)")
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=1.0)
        if _lost(placement):
            return None
    places = []
    for rank, answer in enumerate(answers):
        try:
            places.append(ray.get(answer))
        except ray.exceptions.RayError as error:
            time.sleep(_NODE_DEATH_GRACE)
            if _lost(placement):
                return None
            raise StartupError(f"rank {rank} failed at the start of its process: {explain(error)}") from error
    moved = tuple(place.node_id for place in places) != placement.nodes
    return None if moved else tuple(places)


def _lost(placement: Placement) -> bool:
    return not set(placement.nodes) <= alive_node_ids()


def _give_back(placement: Placement, actors: list[ray.actor.ActorHandle]) -> None:
    for actor in actors:
        ray.kill(actor, no_restart=True)
    placement.remove()
