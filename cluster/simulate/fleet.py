"""Many replicas over one trace.

Replicas do not affect each other but through the router and the trace, so each runs on its own through a window of
virtual time, and between windows the router learns what changed. A window is therefore also how old the router's
picture of the caches is, as with replicas that report now and then.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cluster.simulate.engine import SimulatedEngine, TimedWorker
from cluster.simulate.metrics import Recorder, RunResult, Totals
from cluster.simulate.routers import DIGEST_BLOCKS, create_router
from cluster.simulate.tokens import prompt_tokens
from cluster.simulate.traces import Trace
from kvcache import PrefixDigest
from scheduler.config import SchedulerConfig
from scheduler.request import InvalidRequest, Request
from scheduler.sampling_params import SamplingParams

MAX_SAMPLES = 4096  # of the series: every second one is dropped when there are more


@dataclass(frozen=True)
class FleetSpec:
    """`replicas` engines of one configuration, `gpus_per_replica` each. `window` is in seconds."""

    scheduler: SchedulerConfig
    vocab_size: int
    replicas: int = 1
    gpus_per_replica: int = 1
    router: str = "power_of_two"
    window: float = 0.1
    seed: int = 0


def simulate(label: str, trace: Trace, spec: FleetSpec, make_worker: Callable[[], TimedWorker]) -> RunResult:
    """Run the trace to its end; deterministic for workers that are."""
    started = time.perf_counter()
    fleet = _Fleet(trace, spec, make_worker)
    fleet.run()
    totals = [engine.totals() for engine in fleet.engines]
    return RunResult(
        label,
        fleet.recorder,
        Totals(
            sum(t.prefilled_tokens for t in totals),
            sum(t.cached_tokens for t in totals),
            sum(t.preemptions for t in totals),
            sum(t.steps for t in totals),
        ),
        np.array(fleet.series).reshape(-1, 5),
        fleet.refused,
        spec.replicas * spec.gpus_per_replica,
        time.perf_counter() - started,
    )


class _Fleet:
    def __init__(self, trace: Trace, spec: FleetSpec, make_worker: Callable[[], TimedWorker]) -> None:
        self._trace, self._spec = trace, spec
        granularity = DIGEST_BLOCKS * spec.scheduler.page_size
        self._router = create_router(spec.router, spec.replicas, granularity, spec.seed)
        self._digests = self._router.needs_digests and spec.replicas > 1 and spec.scheduler.cache_type == "radix"
        self.recorder = Recorder(len(trace.requests))
        self.engines = [
            SimulatedEngine(
                spec.scheduler, make_worker(), self.recorder, PrefixDigest(granularity) if self._digests else None
            )
            for _ in range(spec.replicas)
        ]
        self._loads = np.zeros(spec.replicas, dtype=np.int64)
        self._replica_of = np.zeros(len(trace.requests), dtype=np.int64)
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
            begin = min([engine.next_event for engine in self.engines] + [when for when, _ in self._ready[:1]])
            if np.isinf(begin):
                break
            end = max(end, begin - begin % self._spec.window) + self._spec.window
            while self._ready and self._ready[0][0] < end:
                self._arrive(*heapq.heappop(self._ready))
            for replica, engine in enumerate(self.engines):
                if engine.next_event < end:
                    engine.run_until(end)
                    if self._digests:
                        self._router.learn(replica, engine.digest.take_changes())
            for when, number in self.recorder.take_ended():
                self._loads[self._replica_of[number]] -= 1
                for follower in self._followers.get(number, ()):
                    pause = self._trace.requests[follower].arrival
                    heapq.heappush(self._ready, (max(when + pause, end), follower))
            self._sample(end)

    def _arrive(self, when: float, number: int) -> None:
        wanted = self._trace.requests[number]
        if wanted.prompt_len + wanted.output_len > self._spec.scheduler.max_seq_len:
            self._refuse(number)  # without making its tokens first
            return
        sampling = SamplingParams(max_tokens=wanted.output_len, seed=wanted.output_key, ignore_eos=True)
        prompt = prompt_tokens(wanted.prompt, self._spec.vocab_size)
        request = Request(number, prompt, sampling, wanted.priority, wanted.user)
        replica = self._router.choose(prompt, self._loads) if self._spec.replicas > 1 else 0
        try:
            self.engines[replica].submit(when, request)
        except InvalidRequest:
            self._refuse(number)
            return
        self.recorder.arrival[number] = when
        self._replica_of[number] = replica
        self._loads[replica] += 1

    def _refuse(self, number: int) -> None:
        self.refused += 1
        for follower in self._followers.get(number, ()):
            self._refuse(follower)

    def _sample(self, now: float) -> None:
        self._windows += 1
        if self._windows % self._stride:
            return
        stats = [engine.scheduler.stats() for engine in self.engines]
        self.series.append(
            (
                now,
                sum(s.waiting for s in stats),
                sum(s.running for s in stats),
                sum(s.cached_tokens for s in stats),
                sum(s.prefilled_tokens for s in stats),
            )
        )
        if len(self.series) > MAX_SAMPLES:
            self.series = self.series[1::2]
            self._stride *= 2
