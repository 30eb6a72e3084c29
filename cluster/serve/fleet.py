"""What an ingress knows of the engine's replicas, and the work it has given each.

A request gets a `Ticket`, which travels inside its Serve call as far as the router, in this process. The router asks
the fleet for an order of replicas by `cluster.routing`'s score; the ticket's work counts there from that moment until
the ticket is closed, whatever becomes of the call. What other ingresses gave a replica, what its prefix cache holds
and whether it is well, it reports itself (`replica_report`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.routing import PrefixIndex, best_first, work_of
from cluster.serve.replica_report import ReplicaReport
from kvcache.digest import prefix_hashes

SILENT_SECONDS = 5.0  # since the last report: so many make a replica suspect (it reports once a second at least)


@dataclass(slots=True)
class _Replica:
    slot: int  # its number in the index
    sequence: int = 0  # of the last report that was understood; 0: its cache is not known
    reported: float | None = None  # when that was
    others: int = 0  # outstanding tokens of other ingresses' requests
    unwell: bool = False  # as last reported
    failed: bool = False  # its engine, for good


class Ticket:
    """One request on its way to a replica. To the engine, which gets a copy, it is an int: the tokens of its work."""

    def __init__(self, fleet: Fleet, hashes: list[int], prompt_len: int, max_tokens: int) -> None:
        self.fleet = fleet
        self.hashes = hashes
        self.prompt_len = prompt_len
        self.max_tokens = max_tokens
        self.replica: str | None = None
        self.work = work_of(prompt_len, 0, max_tokens)
        self.closed = False

    def close(self) -> None:
        """The request has ended, or will never begin. Safe to call again."""
        self.fleet.close(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (self.work,)


class Fleet:
    """The replicas of one engine deployment as seen from one ingress. Thread-safe.

    `block` is the tokens per hash of the replicas' digests: a replica that reports another counts as an empty cache.
    Memory: `max_hashes` hashes for each replica that Serve runs, and a counter for each open ticket's replica.
    """

    def __init__(
        self,
        block: int,
        beta: float,
        max_hashes: int,
        rng: np.random.Generator | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._block = block
        self._beta = beta
        self._rng = rng or np.random.default_rng()
        self._clock = clock
        self._lock = threading.Lock()
        self._index = PrefixIndex(max_hashes)
        self._replicas: dict[str, _Replica] = {}
        self._own: Counter[str] = Counter()  # outstanding tokens of this ingress's requests

    def ticket(self, prompt: np.ndarray, max_tokens: int) -> Ticket:
        """A request's ticket; `prompt` is its int32 ids. The caller closes it."""
        hashes = prefix_hashes(prompt[:-1], self._block).tolist()  # the last token is always computed
        return Ticket(self, hashes, len(prompt), max_tokens)

    def close(self, ticket: Ticket) -> None:
        with self._lock:
            self._withdraw(ticket)
            ticket.closed = True

    def order(self, running: Sequence[str], ticket: Ticket | None) -> list[str]:
        """Replicas that may get the request, best first; its work counts for the first from now on.

        `running` are those that Serve sends requests to. One that is unwell or has fallen silent is left out, unless
        all are; one whose engine has failed even then, while there is another.
        """
        with self._lock:
            self._retain(running)
            names = (
                [name for name in running if self._is_well(self._replicas[name])]
                or [name for name in running if not self._replicas[name].failed]
                or list(running)
            )
            replicas = [self._replicas[name] for name in names]
            matched = np.zeros(len(names), dtype=np.int64)
            if ticket is not None and ticket.hashes:
                slots = [replica.slot for replica in replicas]
                matched = self._block * self._index.matched(ticket.hashes, max(slots) + 1)[slots]
            outstanding = np.array(
                [self._own[name] + replica.others for name, replica in zip(names, replicas, strict=True)]
            )
            if ticket is not None and ticket.replica in names:  # asked again: it does not stand in its own way
                outstanding[names.index(ticket.replica)] -= ticket.work
            best = best_first(matched, outstanding, self._beta, self._rng).tolist()
            if ticket is not None and best:
                self._assign(ticket, names[best[0]], int(matched[best[0]]))
            return [names[place] for place in best]

    def routed(self, ticket: Ticket, name: str) -> None:
        """The replica that took the request after all."""
        with self._lock:
            if ticket.replica != name:
                replica = self._replicas.get(name)
                blocks = self._index.matched(ticket.hashes, replica.slot + 1)[replica.slot] if replica else 0
                self._assign(ticket, name, self._block * int(blocks))

    def failed(self, name: str | None) -> bool:
        """A replica has answered that its engine has failed, which it will say to every request from now on. Returns
        whether there is another."""
        with self._lock:
            if name in self._replicas:
                self._replicas[name].failed = True
            return any(not replica.failed for replica in self._replicas.values())

    def is_held(self, ticket: Ticket) -> bool:
        """Whether a replica that reports that it is well has the request, or gets it next."""
        with self._lock:
            replica = self._replicas.get(ticket.replica)
            return replica is not None and replica.reported is not None and self._is_well(replica)

    def learn(self, report: ReplicaReport) -> None:
        """A replica's report; of one that Serve has not told us of yet, nothing is kept."""
        with self._lock:
            replica = self._replicas.get(report.replica)
            if replica is None:
                return
            replica.reported = self._clock()
            replica.others, replica.unwell = report.outstanding, report.unwell
            follows = replica.sequence and report.sequence == replica.sequence + 1
            if report.block == self._block and (report.change.full or follows):
                self._index.learn(replica.slot, report.change)
                replica.sequence = report.sequence
            else:
                self._index.forget(replica.slot)
                replica.sequence = 0

    @property
    def unknown(self) -> int:
        """Replicas whose cache is not known, or that have fallen silent: they have to be asked for reports."""
        with self._lock:
            return sum(not each.sequence or self._is_silent(each) for each in self._replicas.values())

    def outstanding(self) -> dict[str, int]:
        """Tokens of work by replica: this ingress's and, as last reported, the others'."""
        with self._lock:
            return {name: self._own[name] + replica.others for name, replica in self._replicas.items()}

    # -- with the lock held ----------------------------------------------------------------------------------------

    def _retain(self, running: Sequence[str]) -> None:
        if self._replicas.keys() == set(running):
            return
        for name in self._replicas.keys() - set(running):
            self._index.forget(self._replicas.pop(name).slot)
        used = {replica.slot for replica in self._replicas.values()}
        free = (slot for slot in range(len(running)) if slot not in used)
        for name in running:
            if name not in self._replicas:
                self._replicas[name] = _Replica(next(free))

    def _is_silent(self, replica: _Replica) -> bool:
        return replica.reported is not None and self._clock() - replica.reported > SILENT_SECONDS

    def _is_well(self, replica: _Replica) -> bool:
        return not (replica.unwell or replica.failed or self._is_silent(replica))

    def _assign(self, ticket: Ticket, name: str, matched: int) -> None:
        if ticket.closed:
            return
        self._withdraw(ticket)
        ticket.replica = name
        ticket.work = work_of(ticket.prompt_len, matched, ticket.max_tokens)
        self._own[name] += ticket.work

    def _withdraw(self, ticket: Ticket) -> None:
        if ticket.replica is not None:
            self._own[ticket.replica] -= ticket.work
            if not self._own[ticket.replica]:
                del self._own[ticket.replica]
            ticket.replica = None
