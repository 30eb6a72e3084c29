"""Where the streams of an engine that fails go, with hand-made calls in place of Serve's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.config import EngineConfig
from cluster.errors import EngineDeadError, PoisonRequestError
from cluster.serve import failover
from cluster.serve.engine_client import EngineClient
from cluster.serve.errors import to_wire
from cluster.serve.fleet import Ticket
from cluster.serve.open_call import GroupOptions
from cluster.serve.replica_report import ReplicaReport
from cluster.serve.streams import StreamGroup
from cluster.tokenizer import Tokenizer
from kvcache.digest import DigestChange
from scheduler.sampling_params import SamplingParams
from tests.unit.tiny_tokenizers import byte_level

DEAD = EngineDeadError("rank 0 died")
NONE = np.empty(0, dtype=np.uint64)


class Call(asyncio.Future):
    """A Serve call that a replica has."""

    replica: str | None


class Handle:
    """Gives each call to the replica that the fleet likes best; those in `failed` refuse it."""

    deployment_name = "engine"

    def __init__(self, replicas: list[str]) -> None:
        self.replicas = replicas
        self.failed: set[str] = set()
        self.calls: list[Call] = []
        self.generate = self

    def remote(self, asked: bytes, work: Ticket) -> Call:
        work.fleet.order(self.replicas, work)
        call = Call()
        call.replica = work.replica
        self.calls.append(call)
        if call.replica in self.failed:
            call.set_result({"error": to_wire(DEAD), "refused": True})
        return call

    def broadcast(self, *_: Any) -> None:
        raise TimeoutError

    def fail(self, replica: str) -> None:
        """For good: it answers its calls with an error, and so those to come."""
        self.failed.add(replica)
        for call in self.open_at(replica):
            call.set_result({"error": to_wire(DEAD)})

    def open_at(self, replica: str) -> list[Call]:
        return [call for call in self.calls if call.replica == replica and not call.done()]


@pytest.fixture
def handle() -> Handle:
    return Handle(["r0", "r1"])


@pytest.fixture
async def client(handle: Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineClient]:
    for name in ("GATHER", "CHECK", "FIRST_DELAY"):
        monkeypatch.setattr(failover, name, 0.01)
    client = EngineClient(handle, Tokenizer(byte_level(tmp_path)), "node", "127.0.0.1", EngineConfig())
    client.fleet.order(handle.replicas, None)
    yield client
    client.close()


def open_streams(client: EngineClient, count: int) -> StreamGroup:
    return client.open([([1, 2, 3], SamplingParams(max_tokens=8))] * count, GroupOptions(time.monotonic()))


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_the_streams_of_an_engine_that_fails_go_on_at_another(handle: Handle, client: EngineClient) -> None:
    group = open_streams(client, 6)
    assert len(handle.open_at("r0")) == len(handle.open_at("r1")) == 3
    handle.fail("r0")
    await until(lambda: len(handle.open_at("r1")) == 6)
    open_streams(client, 10)
    assert len(handle.open_at("r1")) == 16  # none asks the failed one again, which has nothing to do
    assert not group.has_next


async def test_a_replica_that_refuses_for_having_failed_is_asked_once(handle: Handle, client: EngineClient) -> None:
    handle.failed.add("r0")
    for _ in range(6):
        open_streams(client, 1)
        await asyncio.sleep(0)
    await until(lambda: len(handle.open_at("r1")) == 6)
    assert sum(call.replica == "r0" for call in handle.calls) <= 1
    assert client._failover._suspects.alone is None  # what never ran is not to blame


@pytest.mark.parametrize("replicas", [1, 2])
async def test_when_all_engines_have_failed_the_answer_is_that(
    handle: Handle, client: EngineClient, replicas: int
) -> None:
    del handle.replicas[replicas:]
    client.fleet.order(handle.replicas, None)
    group = open_streams(client, 1)
    for name in handle.replicas:
        handle.fail(name)
    with pytest.raises(EngineDeadError, match="rank 0 died"):
        await asyncio.wait_for(anext(group), 10)
    with pytest.raises(EngineDeadError, match="rank 0 died"):
        await asyncio.wait_for(anext(open_streams(client, 1)), 10)


async def test_a_request_whose_engine_fails_wherever_it_runs_is_ended(handle: Handle, client: EngineClient) -> None:
    handle.replicas += ["r2", "r3", "r4"]
    client.fleet.order(handle.replicas, None)
    group = open_streams(client, 1)
    for _ in range(3):
        await until(lambda: any(not call.done() for call in handle.calls))
        handle.fail(next(call.replica for call in handle.calls if not call.done()))
    with pytest.raises(PoisonRequestError, match="rank 0 died"):
        await asyncio.wait_for(anext(group), 10)


async def test_a_stream_is_held_by_a_replica_that_is_well(handle: Handle, client: EngineClient) -> None:
    (stream,) = open_streams(client, 1).streams
    assert not client._is_held(stream)  # no replica has reported yet
    for name in handle.replicas:
        client.fleet.learn(ReplicaReport(name, 1, 64, DigestChange(True, NONE, NONE), 0, False))
    assert client._is_held(stream)
    client.close_group(stream.group)
    assert not client._is_held(stream)
