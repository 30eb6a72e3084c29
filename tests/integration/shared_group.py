"""`SharedGroup`: ranks that start once and then serve many schedulers, one after the other.

A grid over cache types, budgets and overlap depths needs new schedulers, not new processes: what a rank holds is
written anew by the admissions of the next scheduler.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cluster.config import EngineConfig
from cluster.driver import Driver
from cluster.errors import EngineError
from cluster.progress import no_progress
from cluster.settings import group_config
from cluster.timeline import Timeline
from cluster.worker_group import WorkerGroup
from scheduler.config import SchedulerConfig
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.request import Request
from scheduler.scheduler import Scheduler, SchedulerStats

TIMEOUT = 240.0


class KeptGroup:
    """A group for one driver: everything of the real one, but its end is not the ranks' end."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def stop(self, grace: float = 0.0) -> None:
        pass


@dataclass
class Served:
    """What became of some requests: by request id, and the scheduler's counters after them."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, FinishReason] = field(default_factory=dict)
    cached_tokens: dict[int, int] = field(default_factory=dict)
    stats: SchedulerStats | None = None

    def take(self, outputs: StepOutputs) -> None:
        columns = (outputs.request_ids, outputs.tokens, outputs.finish, outputs.cached_tokens)
        for request_id, token, finish, cached in zip(*(column.tolist() for column in columns), strict=True):
            assert request_id not in self.finish, "an output after the finish"
            tokens = self.tokens.setdefault(request_id, [])
            if token >= 0:
                tokens.append(token)
                self.cached_tokens[request_id] = cached
            if finish:
                self.finish[request_id] = FinishReason(finish)


class SharedGroup:
    """Real ranks on the CPU, as Ray actors. `config`: settings of `EngineConfig`, the limits of all schedulers."""

    def __init__(self, model: Path, **config: Any) -> None:
        self.config = EngineConfig(model=str(model), device="cpu", **config)
        self.group = WorkerGroup(group_config(self.config, model, "cpu", may_grow=False))
        self.info = self.group.start(Timeline(no_progress))
        self.usable = True  # nobody left steps in flight

    def stop(self) -> None:
        self.group.stop()

    def scheduler_config(self, **changes: Any) -> SchedulerConfig:
        """As the engine would make it; `changes` may lower its limits."""
        values = {
            "num_pages": self.info.num_pages,
            "page_size": self.config.page_size,
            "max_running_requests": self.config.max_running_requests,
            "max_seq_len": self.info.max_seq_len,
            "max_step_tokens": self.config.max_step_tokens,
        }
        return SchedulerConfig(**(values | changes))

    def serve(self, requests: Sequence[Request], gap: int = 0, **changes: Any) -> Served:
        """Run these requests to their end with a new scheduler and driver, invariants checked at every step.

        With `gap` > 0 a request is added when that many steps have been answered since the one before it, otherwise all
        at once.
        """
        scheduler = Scheduler(self.scheduler_config(**changes))
        arrivals: queue.SimpleQueue[StepOutputs | EngineError] = queue.SimpleQueue()
        driver = Driver(KeptGroup(self.group), scheduler, TIMEOUT, 1, arrivals.put, arrivals.put)
        waiting = deque(requests)
        for _ in range(1 if gap else len(waiting)):
            driver.post(partial(scheduler.add, waiting.popleft()))
        added_at = 0
        self.usable = False
        driver.start()
        served = Served()
        try:
            while len(served.finish) < len(requests):
                arrival = arrivals.get(timeout=TIMEOUT)
                if isinstance(arrival, EngineError):
                    raise arrival
                served.take(arrival)
                assert not arrival.errors
                if waiting and (driver.steps - added_at >= gap or len(served.finish) + len(waiting) == len(requests)):
                    driver.post(partial(scheduler.add, waiting.popleft()))
                    added_at = driver.steps
            self._wait_until_idle(scheduler)
        finally:
            driver.close()
        self.usable = True
        served.stats = scheduler.stats()
        stats = served.stats
        assert stats.running == stats.waiting == 0
        assert stats.free_pages + stats.cached_pages == stats.total_pages
        return served

    @staticmethod
    def _wait_until_idle(scheduler: Scheduler) -> None:
        """A request that stopped on EOS has wasted steps in flight."""
        deadline = time.monotonic() + TIMEOUT
        while scheduler.has_work or scheduler.num_in_flight:
            assert time.monotonic() < deadline
            time.sleep(0.001)


class SharedGroups:
    """Groups by their settings. Only the last one used runs: order tests by what the ranks depend on."""

    def __init__(self) -> None:
        self._key: tuple | None = None
        self._group: SharedGroup | None = None

    def get(self, model: Path, **config: Any) -> SharedGroup:
        key = (model, *sorted(config.items()))
        if key != self._key or not self._group.usable:
            self.stop()
            self._group, self._key = SharedGroup(model, **config), key
        return self._group

    def stop(self) -> None:
        if self._group is not None:
            self._group.stop()
        self._group, self._key = None, None


@contextmanager
def shared_groups() -> Iterator[SharedGroups]:
    groups = SharedGroups()
    try:
        yield groups
    finally:
        groups.stop()
