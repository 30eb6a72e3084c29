"""`SpareRanks`: processes that wait to take the ranks' places, so that a recovery need not start any."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import ray

from cluster.errors import StartupError
from cluster.local_processes import end_ray_workers
from cluster.placement import Placement
from cluster.rank_actors import RankActors, find_actors, start_actor
from cluster.rank_startup import Whereabouts
from cluster.timeline import Timeline

logger = logging.getLogger(__name__)

# Seconds after the ranks' start, or after the last stream that their predecessors' end interrupted goes on: the first
# requests have the processor, and short runs need no spares.
DELAY = 5.0
_KILL_GRACE = 0.5


class SpareRanks:
    """One process per rank, in the rank's bundle: everything is imported, no GPU memory is held.

    A spare takes no resources of its own: the placement group holds the rank's, which the spare uses once the rank is
    gone. They die with the placement group. Started by a thread of its own; everything else belongs to one thread.

    Args:
        places: of the ranks that run now.
        cards: per rank, what CUDA_VISIBLE_DEVICES has to be; () for none.
        modules: to be imported.
    """

    def __init__(
        self,
        placement: Placement,
        places: Sequence[Whereabouts],
        cards: Sequence[tuple[str, ...]],
        modules: tuple[str, ...],
    ) -> None:
        self.placement = placement
        self._places = places
        self._cards = cards
        self._modules = modules
        self._actors: list[ray.actor.ActorHandle] = []
        self._prepared: list[ray.ObjectRef] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(DELAY, self._start)
        self._timer.daemon = True
        self._timer.start()

    @property
    def ready(self) -> bool:
        """Whether every spare has imported everything. Thread-safe."""
        prepared = list(self._prepared)
        return len(prepared) == len(self._places) and len(self._finished(prepared)) == len(prepared)

    def take(self, deadline: float, timeline: Timeline, check: Callable[[], None]) -> RankActors | None:
        """The spares as a group's actors, also if they are still importing; None if there are none, or one is dead.

        They are the caller's then. Arguments as of `start_rank_actors`.
        """
        self._cancel()
        if not self._actors:
            return None
        timeline.enter("actors")
        asked = [actor.whereabouts.remote() for actor in self._actors]  # now: they may have died since they prepared
        try:
            places = find_actors(self.placement, asked, deadline, check)
            ray.get(self._prepared)
        except (StartupError, ray.exceptions.RayError) as error:
            logger.warning("the spare ranks cannot be used: %s", error)
            return None
        if places is None:
            return None
        places = tuple(replace(place, gpu_ids=rank.gpu_ids) for place, rank in zip(places, self._places, strict=True))
        actors, self._actors, self._prepared = self._actors, [], []
        return RankActors(self.placement, actors, places)

    def end(self) -> None:
        """End those that were not taken. Safe to call twice."""
        self._cancel()
        if not ray.is_initialized():
            return
        here = ray.get_runtime_context().get_node_id()
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        pids = []
        for answer in self._finished(self._prepared):
            with contextlib.suppress(ray.exceptions.RayError):
                place = ray.get(answer)
                pids += [place.pid] if place.node_id == here else []
        end_ray_workers(pids, _KILL_GRACE)
        self._actors, self._prepared = [], []

    def _start(self) -> None:
        with self._lock:
            if self._timer.finished.is_set():
                return
            try:
                for bundle, cards in zip(self.placement.bundles, self._cards, strict=True):
                    actor = start_actor(self.placement, bundle, {})
                    self._actors.append(actor)
                    self._prepared.append(actor.prepare.remote(self._modules, cards))
            except Exception:  # what is wrong will show when the group fails, if it matters then
                logger.warning("no spare ranks", exc_info=True)

    def _cancel(self) -> None:
        self._timer.cancel()
        with self._lock:  # held while they are being started
            pass

    @staticmethod
    def _finished(answers: list[ray.ObjectRef]) -> list[ray.ObjectRef]:
        return ray.wait(answers, num_returns=len(answers), timeout=0)[0] if answers else []
