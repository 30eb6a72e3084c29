"""Which streams go where when engines die, with a hand-made engine in place of Serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from cluster.errors import EngineDeadError, PoisonRequestError, RaydixError, TransportError
from cluster.recovery import PROGRESS
from cluster.serve import failover
from cluster.serve.failover import CONNECTION_LOSSES, HELD_TIMEOUTS, Failover, Loss


class Stream:
    """What `Failover` looks at of a stream."""

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.tokens: list[int] = []
        self.ended = self.complete = False
        self.error: RaydixError | None = None

    def get_on(self, tokens: int = PROGRESS) -> None:
        self.tokens += [0] * tokens

    def fail(self, error: RaydixError) -> None:
        self.error, self.ended = error, True


class Engine:
    """Streams that were sent, until they are lost or end."""

    def __init__(self, timeout: float = 60.0) -> None:
        self.running: list[Stream] = []
        self.held: set[Stream] = set()  # those in the line of an engine that is well
        self.looks = 0
        self.failover = Failover(timeout, self.running.append, lambda stream, error: stream.fail(error), self._is_held)

    def _is_held(self, stream: Stream) -> bool:
        self.looks += 1
        return stream in self.held

    def open(self, count: int) -> list[Stream]:
        streams = [Stream(float(number)) for number in range(count)]
        for stream in streams:
            self.failover.admit(stream)
        return streams

    async def lose(self, loss: Loss = Loss.DEATH) -> None:
        """All that run are lost; returns when that was judged."""
        lost, self.running[:] = [stream for stream in self.running if not stream.ended], []
        for stream in lost:
            self.failover.lost(stream, "the engine is gone", loss)
        await self.until(lambda: not self.failover._lost)

    async def look(self) -> None:
        """Until `Failover` has asked who is held, all over from now on."""
        before = self.looks
        await self.until(lambda: self.looks > before + len(self.failover._away))

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "GATHER", 0.01)
    monkeypatch.setattr(failover, "CHECK", 0.005)
    monkeypatch.setattr(failover, "FIRST_DELAY", 0.01)


@dataclass
class Clock:
    """`Failover`'s time, which only a test moves."""

    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(failover, "time", clock)
    return clock


async def test_all_streams_of_a_dead_engine_are_sent_again_in_their_order() -> None:
    engine = Engine()
    streams = engine.open(3)
    engine.running.reverse()
    await engine.lose()
    assert engine.failover.active
    await engine.until(lambda: engine.running == streams)
    for stream in streams:
        stream.get_on(1)
    await engine.until(lambda: not engine.failover.active)
    assert not any(stream.error for stream in streams)


async def test_a_stream_whose_reader_left_is_not_sent_again() -> None:
    engine = Engine()
    gone, kept = engine.open(2)
    engine.failover.lost(gone, "gone", Loss.DEATH)
    engine.failover.lost(kept, "gone", Loss.DEATH)
    gone.ended = True
    engine.running.clear()
    await engine.until(lambda: engine.running == [kept])


async def test_when_no_engine_comes_all_that_wait_fail_with_one_error() -> None:
    engine = Engine(timeout=0.1)
    streams = engine.open(2)
    await engine.lose()
    streams += engine.open(1)  # one that came meanwhile
    await engine.until(lambda: all(stream.error for stream in streams))
    assert {type(stream.error) for stream in streams} == {EngineDeadError}
    assert "no other took over within 0.1 s" in str(streams[0].error)
    await engine.until(lambda: not engine.failover.active)


async def test_after_giving_up_the_next_loss_is_a_first_one() -> None:
    engine = Engine(timeout=4.0)
    streams = engine.open(2)
    await engine.lose(Loss.CONNECTION)
    await engine.until(lambda: all(stream.error for stream in streams) and not engine.failover.active)
    assert not engine.failover._connection_losses
    engine.running.clear()
    (late,) = engine.open(1)
    await engine.lose()
    await engine.until(lambda: engine.running == [late])
    assert late.error is None


async def test_after_a_loss_that_nobody_survived_the_next_one_is_a_first_one(clock: Clock) -> None:
    engine = Engine()
    (poison,) = engine.open(1)
    while poison.error is None:
        poison.get_on(1)  # the convict may get some tokens, fewer than would clear it, before it kills once more
        await engine.lose()
        await engine.until(lambda: poison.error or poison in engine.running)
    assert isinstance(poison.error, PoisonRequestError)
    await engine.until(lambda: not engine.failover.active)
    clock.now += 1000
    streams = engine.open(3)
    await engine.lose()
    await engine.until(lambda: engine.running == streams)
    streams[0].get_on(1)
    await engine.until(lambda: streams[0] not in engine.failover._away)  # they were looked at
    assert not any(stream.error for stream in streams)


async def test_the_line_of_an_engine_that_is_well_may_be_longer_than_the_timeout(clock: Clock) -> None:
    engine = Engine(timeout=60)
    streams = engine.open(2)
    await engine.lose()
    engine.held.add(streams[0])
    streams += engine.open(1)
    clock.now += 70
    await engine.look()
    assert not any(stream.error for stream in streams)
    engine.held.clear()  # it has failed, or recovers: the time begins anew
    clock.now += 50
    await engine.look()
    assert not any(stream.error for stream in streams)
    clock.now += 11
    await engine.until(lambda: all(stream.error for stream in streams))


async def test_nobody_stands_in_line_for_ever(clock: Clock) -> None:
    engine = Engine(timeout=60)
    (stream,) = engine.open(1)
    engine.held.add(stream)
    await engine.lose()
    clock.now += 60 * HELD_TIMEOUTS + 1
    await engine.until(lambda: stream.error is not None)
    assert f"({HELD_TIMEOUTS} x replica_timeout)" in str(stream.error)


async def test_deaths_between_which_streams_get_on_harm_nobody() -> None:
    engine = Engine()
    streams = engine.open(4)
    for _ in range(6):
        await engine.lose()
        await engine.until(lambda: engine.running == streams)
        for stream in streams:
            stream.get_on()
        await engine.until(lambda: not engine.failover.active)
    assert not any(stream.error for stream in streams)


async def test_a_request_that_kills_every_engine_fails_alone() -> None:
    engine = Engine()
    streams = engine.open(16)
    poison, deaths, late = streams[5], 0, []
    while poison.error is None:
        assert deaths < 4
        await engine.until(lambda: {poison, engine.failover._suspects.alone} & {*engine.running})
        if poison in engine.running:
            deaths += 1
            await engine.lose()
            late += engine.open(1)  # others come while suspects are looked at
        else:  # a suspect that runs alone
            engine.running.pop().get_on()
    assert isinstance(poison.error, PoisonRequestError) and deaths == 3
    others = [stream for stream in streams + late if stream is not poison]
    ran: set[Stream] = set()

    def everybody_ran() -> bool:
        ran.update(engine.running)
        for stream in engine.running:
            stream.get_on()
        engine.running.clear()
        return ran >= set(late)

    await engine.until(everybody_ran)
    assert not any(stream.error for stream in others)


async def test_a_broken_connection_makes_nobody_suspect_but_not_for_ever() -> None:
    engine = Engine()
    (stream,) = engine.open(1)
    for _ in range(CONNECTION_LOSSES - 1):
        await engine.lose(Loss.CONNECTION)
        await engine.until(lambda: engine.running == [stream])
    stream.get_on(1)
    await engine.until(lambda: not engine.failover.active)
    for _ in range(CONNECTION_LOSSES):
        assert stream.error is None
        await engine.until(lambda: engine.running == [stream])
        await engine.lose(Loss.CONNECTION)
    assert isinstance(stream.error, TransportError)


async def test_with_two_ingresses_a_request_that_kills_the_engine_runs_four_times_at_most() -> None:
    """Each judges its own streams; those beside the poison at its ingress all get on."""
    one, other = Engine(), Engine()
    streams, elsewhere = one.open(4), other.open(4)
    poison, runs = streams[2], 0
    for _ in range(2000):
        if poison in one.running:
            runs += 1
            await asyncio.gather(one.lose(), other.lose())
        for stream in [*one.running, *other.running]:
            stream.get_on(1)
        if poison.error and not one.failover.active and not other.failover.active:
            break
        await asyncio.sleep(0.002)
    assert runs in (3, 4)  # one that was cleared may still run beside it
    assert isinstance(poison.error, PoisonRequestError)
    assert not any(stream.error for stream in streams if stream is not poison)
    assert sum(stream.error is not None for stream in elsewhere) <= 1
