"""What happens between a failure of the ranks and the next step: how often, how soon, and whose fault it is.

`StartBudget`, `Suspects` and `Interrupted` decide and know neither Ray nor a scheduler; `GroupRestart` does the work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from cluster.errors import EngineClosedError
from cluster.progress import no_progress
from cluster.timeline import Timeline
from cluster.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

FIRST_DELAY, LAST_DELAY = 0.5, 30.0  # seconds before the second start in a row that brought nothing; the longest
# A request that got fewer new tokens than this between two failures may have caused both: what arrived of the last
# steps before a failure differs by the overlap depth.
PROGRESS = 4

R = TypeVar("R", bound=Hashable)  # what stands for a request


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery that succeeded. Times are `time.monotonic()`.

    failed    when the driver knew of the failure
    stopped   when every rank was gone
    ready     when the new ranks were ready for steps, at the start number `starts`
    phases    seconds of each phase of that start
    """

    cause: str
    failed: float
    stopped: float
    ready: float
    starts: int
    phases: dict[str, float]

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.phases.items())
        return (
            f"tear-down {self.stopped - self.failed:.2f} s, start {self.ready - self.stopped:.2f} s ({phases}), "
            f"starts {self.starts}"
        )


class StartBudget:
    """At most `limit` starts within `window` seconds, further apart the longer none leads to an answered step."""

    def __init__(self, limit: int, window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.window = window
        self._clock = clock
        self._starts: deque[float] = deque()
        self._fruitless = 0  # starts since a step was answered
        self._forgiving = False

    def take(self) -> float | None:
        """Seconds to wait before the next start, which is counted now; None: there is none left."""
        now = self._clock()
        while self._starts and self._starts[0] <= now - self.window:
            self._starts.popleft()
        if len(self._starts) >= self.limit:
            return None
        self._starts.append(now)
        self._fruitless += 1
        return 0.0 if self._fruitless == 1 else min(FIRST_DELAY * 2.0 ** (self._fruitless - 2), LAST_DELAY)

    def cause_removed(self) -> None:
        """What made the ranks fail is gone: once a step is answered, the starts until then count no more."""
        self._forgiving = True

    def step_answered(self) -> None:
        self._fruitless = 0
        if self._forgiving:
            self._forgiving = False
            self._starts.clear()


class Suspects(Generic[R]):
    """Finds a request that makes the ranks fail whenever it runs.

    A request in flight in two failures in a row, without `PROGRESS` tokens in between, is a suspect. Suspects run one
    at a time, youngest first, while everybody else waits. One that gets its tokens, or ends, is cleared; one that is
    alone in flight when the ranks fail again is convicted. Any number of failures from outside, between which requests
    get on, makes nobody suspect.
    """

    def __init__(self) -> None:
        self.alone: R | None = None  # the only request that may run now
        self._waiting: deque[R] = deque()  # suspects that have not run alone yet
        self._known: dict[R, int] = {}  # tokens known at their last failure, of those in the last one and of suspects

    def failed(self, in_flight: dict[R, int]) -> R | None:
        """The ranks failed with these requests (oldest first; tokens known of each) in flight. Returns the convict.

        `alone` may have changed, and changes again with `review`.
        """
        repeated = [
            request for request, known in in_flight.items() if known - self._known.get(request, -PROGRESS) < PROGRESS
        ]
        suspects = {self.alone, *self._waiting}
        self._known = {request: known for request, known in self._known.items() if request in suspects} | in_flight
        if self.alone is None:
            self._waiting = deque(reversed(repeated))
            self._next()
        elif [self.alone] == list(in_flight) == repeated:
            convict = self.alone
            self._next()
            return convict
        return None

    def review(self, known_len: Callable[[R], int | None]) -> None:
        """Clear whoever runs alone if it got on. `known_len`: tokens of a request, None if it has ended."""
        while self.alone is not None:
            known = known_len(self.alone)
            if known is not None and known - self._known[self.alone] < PROGRESS:
                return
            self._next()

    def _next(self) -> None:
        self.alone = self._waiting.popleft() if self._waiting else None


class Interrupted:
    """The requests that ran when the ranks failed, until each has got something or has ended: the pause is over then,
    and the machine's time no longer theirs alone."""

    def __init__(self) -> None:
        self._requests: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._requests)

    def failed(self, running: Iterable[int]) -> None:
        """The ranks failed while these requests ran."""
        self._requests.update(running)

    def heard_of(self, requests: np.ndarray) -> None:
        """Tokens or ends of these requests (int64[n]) were handed out."""
        if self._requests:
            self._requests.difference_update(requests.tolist())


class GroupRestart:
    """One new start of a group, in a thread of its own so that the driver's can answer meanwhile.

    Ends what is left of the ranks, waits `delay` seconds, starts, with the spare ranks if there are any. `on_done` is
    called in that thread; `error` is None after a success. The group belongs to this thread until then.
    """

    def __init__(self, group: WorkerGroup, delay: float, on_done: Callable[[], None]) -> None:
        self.timeline = Timeline(no_progress)
        self.stopped = 0.0  # when every rank was gone, `time.monotonic()`
        self.done = False
        self.error: Exception | None = None
        self._group = group
        self._delay = delay
        self._on_done = on_done
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="restart", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Give up soon; returns when nothing runs any more."""
        self._cancelled.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._group.stop_ranks()
            self.stopped = time.monotonic()
            self._cancelled.wait(self._delay)
            self._check()
            self._group.start(self.timeline, self._check)
            self.timeline.finish()
        except Exception as error:
            self.error = error
        finally:
            self.done = True
            self._on_done()

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise EngineClosedError("the engine was shut down while its ranks were starting again")
