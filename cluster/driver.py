"""The driver loop: the one thread that owns the scheduler and talks to the ranks."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from cluster.errors import EngineClosedError, EngineDeadError, EngineError
from cluster.histogram import STEP_BOUNDS, Histogram
from cluster.inproc_group import InprocGroup
from cluster.messages import Pong
from cluster.worker_group import WorkerGroup
from scheduler.outputs import StepOutputs
from scheduler.scheduler import Scheduler
from scheduler.step import StepResult

logger = logging.getLogger(__name__)

# An idle group is asked for a collective this often, so that a hung rank shows before the next request does.
PROBE_INTERVAL = 5.0


class Driver:
    """Runs until `close`, or until the group fails.

    One turn: commands from other threads, plan and send as far as the overlap depth allows, hand out the last step's
    outputs (while the next step runs), then sleep until a result, a command or a failure arrives.

    `on_outputs` and `on_failure` are called in the driver's thread. After a failure, `on_failure` is called once, every
    rank is killed and the placement group removed; `failure` tells other threads.
    """

    def __init__(
        self,
        group: WorkerGroup | InprocGroup,
        scheduler: Scheduler,
        step_timeout: float,
        integrity_interval: int,
        on_outputs: Callable[[StepOutputs], None],
        on_failure: Callable[[EngineError], None],
    ) -> None:
        self._group = group
        self._scheduler = scheduler
        self._step_timeout = step_timeout
        self._integrity_interval = integrity_interval
        self._on_outputs = on_outputs
        self._on_failure = on_failure
        self._commands: deque[Callable[[], None]] = deque()
        self._in_flight: deque[tuple[int, float]] = deque()  # (step id, when it was sent), oldest first
        self._probe: Probe | None = None
        self._probes = 0
        self.steps = 0  # answered so far
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)
        self.step_seconds = Histogram(STEP_BOUNDS)  # from when a step could begin to its answer
        self.failure: EngineError | None = None
        self.last_progress = time.monotonic()  # when a step or a probe was last answered

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        """Have `command` called in the driver's thread, before the next step is planned. Thread-safe."""
        self._commands.append(command)
        self._group.wake()

    def close(self) -> None:
        """Stop serving and end the ranks; unfinished requests get EngineClosedError. Thread-safe, returns when done."""
        self.post(self._close)
        self._thread.join()

    def _close(self) -> None:
        self._closing = True

    def _run(self) -> None:
        try:
            self._serve()
            self._end(EngineClosedError("the engine was shut down"), report=self._scheduler.has_work)
        except EngineDeadError as error:
            self._end(error)
        except Exception as error:
            logger.exception("the driver loop failed")
            self._end(EngineDeadError(f"the driver loop failed: {type(error).__name__}: {error}"))

    def _serve(self) -> None:
        outputs: list[StepOutputs] = []
        while not self._closing:
            while self._commands:
                self._commands.popleft()()
            self._plan()
            self._deliver(outputs)
            outputs = self._receive(self._group.poll(self._time_to_wait()))

    def _plan(self) -> None:
        while (plan := self._scheduler.schedule()) is not None:
            self._group.send_plan(plan)
            self._in_flight.append((plan.step_id, time.monotonic()))

    def _deliver(self, outputs: list[StepOutputs]) -> None:
        outputs.append(self._scheduler.take_outputs())
        for output in outputs:
            if len(output):
                self._on_outputs(output)
        if not self._in_flight and self._scheduler.has_work and not self._commands:
            raise EngineDeadError("the scheduler has work but plans nothing (a bug: please report it)")

    def _receive(self, arrived: list[StepResult | tuple[int, Pong]]) -> list[StepOutputs]:
        outputs = []
        for item in arrived:
            if isinstance(item, StepResult):
                outputs.append(self._scheduler.process(item))
                now = time.monotonic()
                _, sent = self._in_flight.popleft()
                self.step_seconds.observe(now - max(sent, self.last_progress))
                self.last_progress = now
                self.steps += 1
                if self._integrity_interval and self.steps % self._integrity_interval == 0:
                    self._scheduler.check_integrity()
            elif self._probe is not None and self._probe.answered(*item):
                self._probe = None
                self.last_progress = time.monotonic()
        return outputs

    def _time_to_wait(self) -> float:
        """Seconds until the watchdog or the next probe is due; sends a probe that is due."""
        now = time.monotonic()
        if self._in_flight or self._probe is not None:
            step, since = self._in_flight[0] if self._in_flight else (None, self._probe.sent)
            # A result restarts the clock: the step behind it may have waited for it.
            left = max(since, self.last_progress) + self._step_timeout - now
            if left <= 0:
                what = "an idle probe" if step is None else f"step {step}"
                raise EngineDeadError(
                    f"no answer to {what} for {self._step_timeout:.0f} s (step_timeout): a rank hangs"
                    + (f"; {self._probe}" if self._probe is not None else "")
                )
            return left
        due = self.last_progress + PROBE_INTERVAL
        if due > now:
            return due - now
        self._probes += 1
        self._probe = Probe(self._probes, self._group.size, now)
        self._group.ping(self._probes)
        return self._step_timeout

    def _end(self, error: EngineError, report: bool = True) -> None:
        """The end of the group, and for now of the engine with it. Recovery would start the group again here."""
        self.failure = error
        try:
            if report:
                logger.log(logging.INFO if isinstance(error, EngineClosedError) else logging.ERROR, "%s", error)
                self._on_failure(error)
        except Exception:
            logger.exception("on_failure raised")
        finally:
            self._group.stop(**({} if isinstance(error, EngineClosedError) else {"grace": 0.0}))
        while self._commands:  # whoever waits for an answer gets one
            try:
                self._commands.popleft()()
            except Exception:  # an error in the middle of planning may have left the scheduler in two minds
                logger.debug("a command after the end failed", exc_info=True)


class Probe:
    """A `Ping` on its way: which ranks have not answered."""

    def __init__(self, number: int, ranks: int, sent: float) -> None:
        self.sent = sent
        self._number = number
        self._missing = set(range(ranks))

    def answered(self, rank: int, pong: Pong) -> bool:
        """Note an answer; True when it was the last one missing."""
        if pong.number == self._number:
            self._missing.discard(rank)
        return not self._missing

    def __str__(self) -> str:
        return f"ranks that did not answer: {', '.join(map(str, sorted(self._missing)))}"
