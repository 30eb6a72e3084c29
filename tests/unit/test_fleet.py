"""What an ingress knows of its replicas: with fake replicas and a fake clock."""

from __future__ import annotations

import pickle
from collections import Counter

import msgpack
import numpy as np
import pytest

from cluster.errors import TransportError
from cluster.routing import OUTPUT_TOKENS
from cluster.serve.fleet import SILENT_SECONDS, Fleet
from cluster.serve.replica_report import ReplicaReport
from kvcache.digest import DigestChange, prefix_hashes

BLOCK = 64
NONE = np.empty(0, dtype=np.uint64)
SECRET = b"s" * 16


def prompt(session: int, length: int) -> np.ndarray:
    return np.arange(length, dtype=np.int32) + 100_000 * session


class World:
    """A fleet of replicas that hold whatever they were given."""

    def __init__(self, replicas: int = 4, beta: float = 0.5, max_hashes: int = 10_000) -> None:
        self.now = 1000.0
        self.fleet = Fleet(BLOCK, beta, max_hashes, np.random.default_rng(0), lambda: self.now)
        self.names = [f"r{number}" for number in range(replicas)]
        self.sequences = Counter()
        self.others = Counter()
        self.fleet.order(self.names, None)
        for name in self.names:
            self.report(name, full=True)

    def report(self, name: str, added=NONE, removed=NONE, full: bool = False, block: int = BLOCK, **changed) -> None:
        self.sequences[name] += 1
        change = DigestChange(full, np.asarray(added, dtype=np.uint64), np.asarray(removed, dtype=np.uint64))
        values = {"outstanding": self.others[name], "unwell": False} | changed
        report = ReplicaReport(name, self.sequences[name], block, change, **values)
        self.fleet.learn(ReplicaReport.decode(report.encode(SECRET), SECRET))

    def send(self, ids: np.ndarray, max_tokens: int = 16):
        """A request; its ticket, open."""
        ticket = self.fleet.ticket(ids, max_tokens)
        self.fleet.order(self.names, ticket)
        return ticket

    def serve(self, ids: np.ndarray, max_tokens: int = 16) -> str:
        """A request from its dispatch to its last byte; its pages stay in the replica's cache."""
        ticket = self.send(ids, max_tokens)
        name = ticket.replica
        ticket.close()
        self.report(name, added=prefix_hashes(ids, BLOCK))
        return name


def test_sessions_stick() -> None:
    world = World()
    homes = {session: world.serve(prompt(session, 200)) for session in range(40)}
    assert set(homes.values()) == set(world.names)
    for turn in range(2, 6):
        for session, home in homes.items():
            assert world.serve(prompt(session, 200 * turn)) == home


def test_misses_spread_evenly() -> None:
    world = World()
    tickets = [world.send(prompt(session, 500)) for session in range(40)]
    assert set(Counter(ticket.replica for ticket in tickets).values()) == {10}


def test_a_hot_prefix_does_not_pile_up_on_one_replica() -> None:
    world = World()
    shared = prompt(1, 640)
    home = world.serve(shared)
    spread = Counter()
    for number in range(200):
        name = world.send(np.append(shared, prompt(2 + number, 64))).replica
        spread[name] += 1
        if number % 10 == 9:  # as fast as reports come
            for each in spread:
                world.report(each, added=prefix_hashes(shared, BLOCK))
    assert set(spread) == set(world.names)
    assert min(spread.values()) >= 40
    assert home in spread


def test_a_busy_home_is_left_and_found_again() -> None:
    world = World()
    home = world.serve(prompt(1, 640))
    world.others[home] = 5000  # of another ingress
    world.report(home)
    ticket = world.send(prompt(1, 1000))
    assert ticket.replica != home
    ticket.close()
    world.others[home] = 0
    world.report(home)
    assert world.serve(prompt(1, 1000)) == home


def test_a_session_does_not_starve_others() -> None:
    world = World(replicas=2)
    home = world.serve(prompt(1, 6400))
    heavy = [world.send(prompt(1, 6400 + 10 * n)) for n in range(200)]
    assert {ticket.replica for ticket in heavy} == set(world.names)
    quiet = world.serve(prompt(2, 100))
    work = world.fleet.outstanding()
    assert quiet == min(work, key=work.get)
    assert home in world.names


def test_work_counts_from_dispatch_to_the_last_byte() -> None:
    world = World()
    home = world.serve(prompt(1, 640))
    ticket = world.send(prompt(1, 650), max_tokens=10_000)
    assert ticket.replica == home
    assert world.fleet.outstanding()[home] == 650 - 640 + OUTPUT_TOKENS
    world.fleet.order(world.names, ticket)  # Serve asks again: it must not count twice, nor shy away from itself
    assert ticket.replica == home and world.fleet.outstanding()[home] == 266
    other = next(name for name in world.names if name != home)
    world.fleet.routed(ticket, other)
    assert world.fleet.outstanding() == dict.fromkeys(world.names, 0) | {other: 650 + OUTPUT_TOKENS}
    ticket.close()
    ticket.close()
    world.fleet.order(world.names, ticket)  # a routing task that comes too late
    world.fleet.routed(ticket, home)
    assert sum(world.fleet.outstanding().values()) == 0


def test_no_counter_leaks_whatever_happens() -> None:
    world = World()
    rng = np.random.default_rng(1)
    tickets = []
    for step in range(2000):
        action = rng.integers(6)
        if action < 2:
            tickets.append(world.send(prompt(int(rng.integers(50)), int(rng.integers(1, 900)))))
        elif action == 2 and tickets:
            world.fleet.routed(tickets[rng.integers(len(tickets))], f"r{rng.integers(9)}")
        elif action == 3 and tickets:
            tickets[rng.integers(len(tickets))].close()
        elif action == 4:  # replicas come and go
            world.names = [f"r{number}" for number in rng.permutation(9)[: rng.integers(1, 9)]]
            world.fleet.order(world.names, None)
        else:
            name = f"r{rng.integers(9)}"
            world.report(name, added=rng.integers(1 << 60, size=3), full=bool(step % 5))
    for ticket in tickets:
        ticket.close()
    assert not world.fleet._own
    assert sum(world.fleet.outstanding().values()) == 0


@pytest.mark.parametrize("how", ["drains", "unwell", "silent", "failed"])
def test_a_replica_that_is_not_well_gets_nothing(how: str) -> None:
    world = World()
    home = world.serve(prompt(1, 640))
    if how == "drains":  # Serve takes one that drains, or is dead, from the list
        world.names.remove(home)
    elif how == "unwell":
        world.report(home, unwell=True)
    elif how == "failed":
        assert world.fleet.failed(home)
        world.report(home)  # it was on its way
    else:
        world.now += SILENT_SECONDS + 1
        for name in world.names:
            if name != home:
                world.report(name)
    assert all(world.send(prompt(1, 640)).replica != home for _ in range(50))
    if how not in ("drains", "failed"):
        world.report(home)
        assert world.send(prompt(1, 640)).replica == home


def test_when_nobody_is_well_requests_still_go_somewhere() -> None:
    world = World()
    for name in world.names:
        world.report(name, unwell=True)
    assert {world.send(prompt(session, 100)).replica for session in range(40)} == set(world.names)


def test_one_that_recovers_is_better_than_one_that_has_failed() -> None:
    world = World(replicas=3)
    world.report("r0", unwell=True)
    assert world.fleet.failed("r1") and world.fleet.failed("r2")
    assert {world.send(prompt(session, 100)).replica for session in range(20)} == {"r0"}
    assert not world.fleet.failed("r0")
    assert not World(replicas=0).fleet.failed(None)  # Ray's own router tells nothing


def test_a_request_is_held_while_its_replica_says_that_it_is_well() -> None:
    world = World(replicas=1)
    ticket = world.send(prompt(1, 100))
    assert world.fleet.is_held(ticket)
    world.report("r0", unwell=True)
    assert not world.fleet.is_held(ticket)
    world.report("r0")
    assert world.fleet.is_held(ticket)
    world.now += SILENT_SECONDS + 1
    assert not world.fleet.is_held(ticket)
    world.report("r0")
    ticket.close()
    assert not world.fleet.is_held(ticket)


def test_changes_after_a_missed_report_are_worthless() -> None:
    world = World()
    world.serve(prompt(1, 640))
    home = world.serve(prompt(1, 640))
    assert not world.fleet.unknown
    world.sequences[home] += 1
    world.report(home, added=[1, 2, 3])
    assert world.fleet.unknown == 1  # it will be asked again
    assert len(world.fleet._index) == 0
    world.report(home, added=prefix_hashes(prompt(1, 640), BLOCK))
    assert world.fleet.unknown == 1
    world.report(home, added=prefix_hashes(prompt(1, 640), BLOCK), full=True)
    assert not world.fleet.unknown
    assert world.serve(prompt(1, 640)) == home


def test_replicas_that_serve_does_not_know_leave_no_trace() -> None:
    world = World(max_hashes=100)
    for number in range(1000):
        world.report(f"stranger{number}", added=range(100), full=True)
    world.report("r0", added=range(10_000), full=True)
    assert len(world.fleet._index) == 100
    assert set(world.fleet.outstanding()) == set(world.names)
    world.report("r1", added=prefix_hashes(prompt(1, 640), 32), full=True, block=32)
    assert world.fleet.unknown == 1


def test_a_ticket_travels_as_a_number() -> None:
    ticket = World().send(prompt(1, 100))
    assert pickle.loads(pickle.dumps(ticket)) == ticket.work == 116


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts[:-1],
        lambda parts: [2, *parts[1:]],
        lambda parts: [parts[0], b"x" * 16, *parts[2:]],
        lambda parts: [*parts[:6], b"123", *parts[7:]],
        lambda parts: [*parts[:8], -1, parts[9]],
        lambda parts: [*parts[:4], 0, *parts[5:]],
        lambda parts: [*parts[:3], "1", *parts[4:]],
        lambda parts: 7,
    ],
)
def test_other_reports_are_refused(change) -> None:
    good = ReplicaReport("r0", 1, BLOCK, DigestChange(True, NONE, NONE), 5, False).encode(SECRET)
    with pytest.raises(TransportError):
        ReplicaReport.decode(msgpack.packb(change(msgpack.unpackb(good))), SECRET)
    with pytest.raises(TransportError):
        ReplicaReport.decode(good[:-3], SECRET)
