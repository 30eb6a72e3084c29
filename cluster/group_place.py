"""`GroupPlace`: where a group's ranks run, kept from one start to the next where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ray

from cluster.placement import Placement
from cluster.rank_actors import RankActors, start_rank_actors
from cluster.rank_startup import Whereabouts, visible_cards
from cluster.spare_ranks import SpareRanks
from cluster.timeline import Timeline


class GroupPlace:
    """The placement group of `tp_size` ranks and the spare ranks in it.

    Args:
        resources: one rank's bundle.
        may_grow: nodes can join the cluster.
        nccl: each rank has a card of its own.
        spare_modules: what spare ranks import; None: there are none.
    """

    def __init__(
        self,
        tp_size: int,
        resources: dict[str, float],
        may_grow: bool,
        nccl: bool,
        spare_modules: tuple[str, ...] | None,
    ) -> None:
        self._tp_size = tp_size
        self._resources = resources
        self._may_grow = may_grow
        self._nccl = nccl
        self._spare_modules = spare_modules
        self._placement: Placement | None = None
        self._spares: SpareRanks | None = None

    @property
    def spares_ready(self) -> bool:
        """Whether spare ranks wait, with everything imported. Thread-safe."""
        spares = self._spares
        return spares is not None and spares.ready

    def start_actors(
        self, placement_timeout: float, deadline: float, timeline: Timeline, check: Callable[[], None]
    ) -> RankActors:
        """An actor per rank: the spares if there are any and all are well, else new ones in a new placement group.

        Arguments and errors as of `start_rank_actors`. No actor may run in this place any more.
        """
        started = self._spares.take(deadline, timeline, check) if self._spares is not None else None
        if started is None:
            self.give_back()
            started = start_rank_actors(
                self._tp_size, self._resources, placement_timeout, deadline, self._may_grow, timeline, check
            )
            self._placement = started.placement
        return started

    def add_spares(self, places: Sequence[Whereabouts]) -> None:
        """Have spares for the ranks that run now, soon."""
        if self._spare_modules is not None:
            cards = [self.visible_cards(place, places) for place in places]
            self._spares = SpareRanks(self._placement, places, cards, self._spare_modules)

    def visible_cards(self, place: Whereabouts, places: Sequence[Whereabouts]) -> tuple[str, ...]:
        return visible_cards(place, places, self._nccl)

    def give_back(self) -> None:
        """End the spares and remove the placement group, with whatever runs in it. Safe to call twice."""
        spares, placement = self._spares, self._placement
        self._spares, self._placement = None, None
        if spares is not None:
            spares.end()
        if placement is not None and ray.is_initialized():  # otherwise Ray has ended everything already
            placement.remove()
