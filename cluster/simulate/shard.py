"""Some of a fleet's replicas, which one process runs: in this process, or in one of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from cluster.simulate.engine import SimulatedEngine, TimedWorker
from cluster.simulate.metrics import Recorder, Totals
from cluster.simulate.tokens import prompt_tokens
from cluster.simulate.traces import Trace
from kvcache import PrefixDigest
from kvcache.digest import DigestChange
from scheduler.config import SchedulerConfig
from scheduler.request import InvalidRequest, Request
from scheduler.sampling_params import SamplingParams


@dataclass(frozen=True)
class ShardSpec:
    """What a shard is made from; can be sent to another process. `granularity` 0: no digests are kept."""

    trace: Trace
    scheduler: SchedulerConfig
    vocab_size: int
    replicas: list[int]
    make_worker: Callable[[], TimedWorker]
    granularity: int = 0


class Arrival(NamedTuple):
    time: float
    number: int  # place in the trace
    replica: int


class WindowReport(NamedTuple):
    """What a shard's replicas did in a window.

    ended       (time, request) of those that ended
    refused     requests that arrived and can never be served
    changes     (replica, what changed in its prefix cache)
    load        waiting and running requests, cached and prefilled input tokens so far, summed over replicas
    next_event  when something happens next; infinite: nothing will
    """

    ended: list[tuple[float, int]]
    refused: list[int]
    changes: list[tuple[int, DigestChange]]
    load: tuple[int, int, int, int]
    next_event: float


class Shard:
    """Replicas that run one after the other through each window."""

    def __init__(self, spec: ShardSpec) -> None:
        self._spec = spec
        self.recorder = Recorder(len(spec.trace.requests))
        self._engines = {
            replica: SimulatedEngine(
                spec.scheduler,
                spec.make_worker(),
                self.recorder,
                PrefixDigest(spec.granularity) if spec.granularity else None,
            )
            for replica in spec.replicas
        }

    def advance(self, arrivals: Iterable[Arrival], end: float) -> WindowReport:
        """Everything before `end`; `arrivals` are those of this window, in order."""
        refused = [arrival.number for arrival in arrivals if not self._submit(arrival)]
        changes = []
        for replica, engine in self._engines.items():
            if engine.next_event < end:
                engine.run_until(end)
                if engine.digest is not None:
                    changes.append((replica, engine.digest.take_changes()))
        stats = [engine.scheduler.stats() for engine in self._engines.values()]
        load = (
            sum(s.waiting for s in stats),
            sum(s.running for s in stats),
            sum(s.cached_tokens for s in stats),
            sum(s.prefilled_tokens for s in stats),
        )
        next_event = min(engine.next_event for engine in self._engines.values())
        return WindowReport(self.recorder.take_ended(), refused, changes, load, next_event)

    def finish(self) -> tuple[Recorder, Totals]:
        return self.recorder, Totals.sum(engine.totals() for engine in self._engines.values())

    def _submit(self, arrival: Arrival) -> bool:
        wanted = self._spec.trace.requests[arrival.number]
        if wanted.prompt_len + wanted.output_len > self._spec.scheduler.max_seq_len:
            return False  # without making its tokens first
        sampling = SamplingParams(max_tokens=wanted.output_len, seed=wanted.output_key, ignore_eos=True)
        prompt = prompt_tokens(wanted.prompt, self._spec.vocab_size)
        try:
            self._engines[arrival.replica].submit(
                arrival.time, Request(arrival.number, prompt, sampling, wanted.priority, wanted.user)
            )
        except InvalidRequest:
            return False
        self.recorder.arrival[arrival.number] = arrival.time
        return True


class LocalShard:
    """A shard in this process, with the interface of `RemoteShard`."""

    def __init__(self, spec: ShardSpec) -> None:
        self._shard = Shard(spec)

    def start(self, arrivals: list[Arrival], end: float) -> None:
        self._report = self._shard.advance(arrivals, end)

    def report(self) -> WindowReport:
        return self._report

    def finish(self) -> tuple[Recorder, Totals]:
        return self._shard.finish()

    def close(self) -> None:
        """Nothing to release."""


class RemoteShard:
    """A shard in a process of its own. `start` returns at once, `report` waits for the window's end."""

    def __init__(self, spec: ShardSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, spec), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, arrivals: list[Arrival], end: float) -> None:
        self._pipe.send((arrivals, end))

    def report(self) -> WindowReport:
        """Raises what the shard raised."""
        return self._receive()

    def finish(self) -> tuple[Recorder, Totals]:
        self._pipe.send(None)
        return self._receive()

    def close(self) -> None:
        """Ends the process, wherever it is."""
        self._pipe.close()
        self._process.terminate()
        self._process.join()

    def _receive(self) -> Any:
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(pipe: Connection, spec: ShardSpec) -> None:
    try:
        shard = Shard(spec)
        while (window := pipe.recv()) is not None:
            pipe.send(shard.advance(*window))
        pipe.send(shard.finish())
    except EOFError:  # the other side has gone
        pass
    except Exception as error:
        pipe.send(error)


def merge_recorders(recorders: list[Recorder]) -> Recorder:
    """One recorder of requests of which each is in at most one of `recorders`."""
    first, *others = recorders
    for other in others:
        first.take_from(other)
    return first


def split(replicas: int, shards: int) -> list[list[int]]:
    """Replica numbers dealt out to at most `shards` shards."""
    return [part.tolist() for part in np.array_split(np.arange(replicas), min(shards, replicas))]
