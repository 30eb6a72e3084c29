"""The router class on Ray Serve's own machinery: fake replicas, no cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from cluster.serve.fleet import Fleet, Ticket
from cluster.serve.replica_report import ReplicaReport
from cluster.serve.router import TICKET, CacheAwareRouter
from kvcache.digest import DigestChange, prefix_hashes

ENGINE = DeploymentID("engine", "app")
NONE = np.empty(0, dtype=np.uint64)


class FakeReplica:
    """As `RunningReplica`: it answers how many requests it has, or nothing."""

    node_id, availability_zone, multiplexed_model_ids = "node", None, frozenset()

    def __init__(self, name: str, limit: int = 100) -> None:
        self.replica_id = ReplicaID(name, ENGINE)
        self.max_ongoing_requests = limit
        self.queue_len = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue_len


class Bench:
    def __init__(self, *replicas: FakeReplica) -> None:
        self.fleet = Fleet(64, 0.25, 1000, np.random.default_rng(0))
        self.router = CacheAwareRouter(
            deployment_id=ENGINE,
            handle_source=DeploymentHandleSource.REPLICA,
            self_node_id="node",
            prefer_local_node_routing=True,
            use_replica_queue_len_cache=True,
        )
        self.router.update_replicas(list(replicas))
        self._calls = 0

    async def choose(self, ticket: Ticket | None) -> str:
        self._calls += 1
        metadata = RequestMetadata(request_id="http", internal_request_id=f"call{self._calls}")
        pending = PendingRequest(args=[], kwargs={TICKET: ticket}, metadata=metadata)
        replica = await asyncio.wait_for(self.router._choose_replica_for_request(pending), 5)
        self.router.on_request_routed(pending, replica.replica_id, None)
        return replica.replica_id.unique_id

    def ticket(self, session: int, length: int = 200) -> Ticket:
        return self.fleet.ticket(np.arange(length, dtype=np.int32) + 10_000 * session, 16)

    def holds(self, name: str, session: int) -> None:
        hashes = prefix_hashes(np.arange(200, dtype=np.int32) + 10_000 * session, 64)
        self.fleet.learn(ReplicaReport(name, 1, 64, DigestChange(True, hashes, NONE), 0, False))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_requests_go_where_their_prefix_is_and_others_spread() -> None:
    async def test() -> None:
        bench = Bench(FakeReplica("a"), FakeReplica("b"), FakeReplica("c"))
        await bench.choose(None)
        await bench.choose(bench.ticket(1))
        bench.holds("b", 7)
        assert [await bench.choose(bench.ticket(7)) for _ in range(3)] == ["b"] * 3
        spread = Counter(await asyncio.gather(*(bench.choose(bench.ticket(100 + n)) for n in range(30))))
        assert min(spread.values()) >= 8

    run(test)


def test_a_replica_at_its_limit_is_passed_over_and_the_work_counts_where_it_went() -> None:
    async def test() -> None:
        full, free = FakeReplica("full", limit=1), FakeReplica("free")
        bench = Bench(full, free)
        await bench.choose(bench.ticket(1))
        bench.holds("full", 7)
        full.queue_len = 1
        bench.router.on_new_queue_len_info(full.replica_id, 1)
        before = bench.fleet.outstanding()["free"]
        ticket = bench.ticket(7)
        assert await bench.choose(ticket) == "free"
        assert ticket.replica == "free"
        assert bench.fleet.outstanding()["free"] == before + 200 + 16

    run(test)


def test_a_dead_replica_gets_nothing() -> None:
    async def test() -> None:
        dead = FakeReplica("dead")
        bench = Bench(dead, FakeReplica("alive"))
        await bench.choose(bench.ticket(1))
        bench.holds("dead", 7)
        assert await bench.choose(bench.ticket(7)) == "dead"
        bench.router.on_replica_actor_died(dead.replica_id)
        assert {await bench.choose(bench.ticket(7)) for _ in range(5)} == {"alive"}
        assert set(bench.fleet.outstanding()) == {"alive"}

    run(test)


def test_a_request_that_is_given_up_while_nobody_can_take_it_leaves_no_work() -> None:
    async def test() -> None:
        full = FakeReplica("full", limit=0)
        bench = Bench(full)
        ticket = bench.ticket(1)
        waiting = asyncio.create_task(bench.choose(ticket))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        ticket.close()
        await asyncio.sleep(0.1)
        assert sum(bench.fleet.outstanding().values()) == 0

    run(test)
