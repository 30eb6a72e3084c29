"""Many replicas over one trace.

Replicas do not affect each other but through the router and the trace, so each runs on its own through a window of
virtual time, and between windows the router learns what changed. A window is therefore also how old the router's
picture of the caches is, as with replicas that report now and then. What comes out does not depend on the number of
processes.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cluster.routing import DEFAULT_BETA, digest_block
from cluster.simulate.engine import TimedWorker
from cluster.simulate.metrics import RunResult, Totals
from cluster.simulate.routers import create_router
from cluster.simulate.shard import (
    Arrival,
    LocalShard,
    RemoteShard,
    ShardSpec,
    WindowReport,
    merge_recorders,
    split,
)
from cluster.simulate.tokens import prompt_tokens
from cluster.simulate.traces import Trace
from scheduler.config import SchedulerConfig

MAX_SAMPLES = 4096  # of the series: every second one is dropped when there are more
NO_TOKENS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class FleetSpec:
    """`replicas` engines of one configuration, `gpus_per_replica` each. `window` is in seconds.

    `jobs` processes share the work.
    """

    scheduler: SchedulerConfig
    vocab_size: int
    replicas: int = 1
    gpus_per_replica: int = 1
    router: str = "power_of_two"
    window: float = 0.1
    seed: int = 0
    jobs: int = 1
    router_beta: float = DEFAULT_BETA


def simulate(label: str, trace: Trace, spec: FleetSpec, make_worker: Callable[[], TimedWorker]) -> RunResult:
    """Run the trace to its end; deterministic for workers that are. With several jobs, `make_worker` is pickled."""
    started = time.perf_counter()
    fleet = _Fleet(trace, spec, make_worker)
    try:
        fleet.run()
        recorders, totals = zip(*(shard.finish() for shard in fleet.shards), strict=True)
    finally:
        for shard in fleet.shards:
            shard.close()
    return RunResult(
        label,
        merge_recorders(list(recorders)),
        Totals.sum(totals),
        np.array(fleet.series).reshape(-1, 5),
        fleet.refused,
        spec.replicas * spec.gpus_per_replica,
        time.perf_counter() - started,
    )


class _Fleet:
    def __init__(self, trace: Trace, spec: FleetSpec, make_worker: Callable[[], TimedWorker]) -> None:
        self._trace, self._spec = trace, spec
        granularity = digest_block(spec.scheduler.page_size)
        self._router = create_router(spec.router, spec.replicas, granularity, spec.router_beta, spec.seed)
        self._digests = self._router.needs_digests and spec.replicas > 1 and spec.scheduler.cache_type == "radix"
        parts = split(spec.replicas, spec.jobs)
        kind = LocalShard if len(parts) == 1 else RemoteShard
        self.shards = [
            kind(
                ShardSpec(
                    trace, spec.scheduler, spec.vocab_size, part, make_worker, granularity if self._digests else 0
                )
            )
            for part in parts
        ]
        self._shard_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        self._next_events = [np.inf] * len(parts)
        self._ready = [(request.arrival, i) for i, request in enumerate(trace.requests) if request.after is None]
        heapq.heapify(self._ready)
        self._followers: dict[int, list[int]] = {}
        for i, request in enumerate(trace.requests):
            if request.after is not None:
                self._followers.setdefault(request.after, []).append(i)
        self.refused = 0
        self.series: list[tuple[float, ...]] = []
        self._windows, self._stride = 0, 1

    def run(self) -> None:
        end = 0.0
        while True:
            begin = min([*self._next_events, *(when for when, _ in self._ready[:1])])
            if np.isinf(begin):
                break
            end = max(end, begin - begin % self._spec.window) + self._spec.window
            arrivals: list[list[Arrival]] = [[] for _ in self.shards]
            while self._ready and self._ready[0][0] < end:
                arrival = self._route(*heapq.heappop(self._ready))
                arrivals[self._shard_of[arrival.replica]].append(arrival)
            for shard, its_arrivals in zip(self.shards, arrivals, strict=True):
                shard.start(its_arrivals, end)
            reports = [shard.report() for shard in self.shards]
            self._next_events = [report.next_event for report in reports]
            for report in reports:
                self._learn(report, end)
            self._sample(end, np.sum([report.load for report in reports], axis=0))

    def _route(self, when: float, number: int) -> Arrival:
        replica = 0
        if self._spec.replicas > 1:
            request = self._trace.requests[number]
            prompt = prompt_tokens(request.prompt, self._spec.vocab_size) if self._digests else NO_TOKENS
            replica = self._router.route(number, prompt, request.prompt_len, request.output_len)
        return Arrival(when, number, replica)

    def _learn(self, report: WindowReport, end: float) -> None:
        for replica, change in report.changes:
            self._router.learn(replica, change)
        for when, number in report.ended:
            self._release(number)
            for follower in self._followers.get(number, ()):
                pause = self._trace.requests[follower].arrival
                heapq.heappush(self._ready, (max(when + pause, end), follower))
        for number in report.refused:
            self._release(number)
            self._refuse(number)

    def _release(self, number: int) -> None:
        if self._spec.replicas > 1:
            self._router.ended(number)

    def _refuse(self, number: int) -> None:
        """It and all that were to follow it."""
        refused = [number]
        while refused:
            self.refused += 1
            refused += self._followers.get(refused.pop(), ())

    def _sample(self, now: float, load: np.ndarray) -> None:
        self._windows += 1
        if self._windows % self._stride:
            return
        self.series.append((now, *load.tolist()))
        if len(self.series) > MAX_SAMPLES:
            self.series = self.series[1::2]
            self._stride *= 2
