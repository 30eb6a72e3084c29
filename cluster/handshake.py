"""The driver's side of a group's start-up: answers the ranks' messages until every rank is ready (see `messages`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster import messages
from cluster.errors import ConfigError, ModelLoadError, StartupError
from cluster.rank_startup import Whereabouts
from cluster.timeline import Timeline
from worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """What a started group turned out to be. `ranks[i]` says where rank i runs; `dtype` is a name like "float32"."""

    num_pages: int
    vocab_size: int
    max_seq_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    graph_sizes: tuple[int, ...]
    ranks: tuple[Whereabouts, ...]


class Handshake:
    """One start-up of one group. `send(rank, message)` answers; `take` is called with each message that arrives."""

    def __init__(
        self,
        group: str,
        ranks: tuple[Whereabouts, ...],
        worker: WorkerConfig,
        timeline: Timeline,
        send: Callable[[int, messages.Message], None],
    ) -> None:
        self._group = group
        self._ranks = ranks
        self._worker = worker
        self._timeline = timeline
        self._send = send
        self._greeted: set[int] = set()
        self._capacities: dict[int, messages.Capacity] = {}
        self._ready: dict[int, messages.Ready] = {}
        self._rendezvous: messages.Rendezvous | None = None
        self._pages = 0

    @property
    def missing(self) -> list[int]:
        """Ranks that are not ready."""
        return [rank for rank in range(len(self._ranks)) if rank not in self._ready]

    def take(self, rank: int, message: messages.Message) -> None:
        """Act on `message` from `rank`.

        Raises:
            ConfigError, ModelLoadError, StartupError: the rank gave up, or is not what was started.
        """
        if isinstance(message, messages.Failed):
            raise self._failure(rank, message)
        if isinstance(message, messages.Hello):
            self._greet(rank, message)
        elif rank not in self._greeted:
            raise StartupError(f"rank {rank} sent {type(message).__name__} before it said hello")
        elif isinstance(message, messages.Progress):
            self._timeline.enter(message.phase, rank, message.fraction)
        elif isinstance(message, messages.Rendezvous):
            self._rendezvous = message
            for other in self._greeted - {rank}:
                self._send(other, message)
        elif isinstance(message, messages.Capacity):
            self._capacities[rank] = message
            if len(self._capacities) == len(self._ranks):
                self._pages = self._worker.num_pages or min(c.pages for c in self._capacities.values())
                for other in range(len(self._ranks)):
                    self._send(other, messages.Allocate(self._pages))
        elif isinstance(message, messages.Ready):
            self._ready[rank] = message
        else:
            raise StartupError(f"rank {rank} sent {type(message).__name__} during start-up")

    def died(self, rank: int, cause: str) -> StartupError:
        """The error for a rank whose process or loop ended before it was ready."""
        return StartupError(f"{self._name(rank)} failed in phase {self._timeline.phase_of(rank)!r}: {cause}")

    def late(self, seconds: float) -> StartupError:
        """The error for a group that was not ready in time: who is missing, and where they are."""
        states = ", ".join(f"{self._name(rank)} in phase {self._timeline.phase_of(rank)!r}" for rank in self.missing)
        return StartupError(f"the group was not ready within {seconds:.0f} s (start_timeout): {states}")

    def info(self) -> GroupInfo:
        """Call once nothing is missing."""
        sizes = {tuple(message.graph_sizes) for message in self._ready.values()}
        if len(sizes) != 1:
            raise StartupError(f"ranks captured different graphs: {sorted(sizes)}")
        model = self._capacities[0]
        eos = tuple(model.eos_token_ids)
        return GroupInfo(self._pages, model.vocab_size, model.max_seq_len, eos, model.dtype, sizes.pop(), self._ranks)

    def _greet(self, rank: int, hello: messages.Hello) -> None:
        expected = messages.Hello(messages.PROTOCOL_VERSION, self._group, rank)
        if hello != expected:
            raise StartupError(
                f"{self._name(rank)} said {hello}, expected {expected}: all nodes need the same version of raydix"
            )
        self._greeted.add(rank)
        self._send(rank, messages.Welcome(messages.PROTOCOL_VERSION, self._group))
        if self._rendezvous is not None:  # rank 0 was faster
            self._send(rank, self._rendezvous)

    def _failure(self, rank: int, failed: messages.Failed) -> ConfigError | StartupError:
        if failed.kind == "model":
            return ModelLoadError(failed.message)
        if failed.kind == "config":
            return ConfigError(failed.message)
        return StartupError(f"{self._name(rank)} failed in phase {failed.phase!r}: {failed.message}")

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._ranks[rank].node_ip}"
