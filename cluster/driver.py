"""The driver loop: the one thread that owns the scheduler and talks to the ranks."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from cluster.errors import EngineClosedError, EngineDeadError, EngineError
from cluster.flight import FlightRecorder, NoRecorder
from cluster.histogram import STEP_BOUNDS, Histogram
from cluster.inproc_group import InprocGroup
from cluster.messages import Pong
from cluster.recovery import GroupRestart, Interrupted, Recovery, StartBudget, Suspects
from cluster.watchdog import Probe, Watchdog
from cluster.worker_group import WorkerGroup
from kvcache import IntegrityError
from scheduler.outputs import StepOutputs
from scheduler.scheduler import Scheduler
from scheduler.step import StepResult

logger = logging.getLogger(__name__)

# An idle group is asked for a collective this often, so that a hung rank shows before the next request does.
PROBE_INTERVAL = 5.0
# Before a rank counts as hung, what it sent is looked for once more: the driver itself may have been away (a long plan,
# a stopped process), and its socket's thread needs a moment to hand over what came meanwhile.
LAST_LOOK = 0.1
_KEPT_RECOVERIES = 32


class Driver:
    """Runs until `close`, or until the group fails and `budget` has no start left (None: has none at all).

    One turn: commands from other threads, plan and send as far as the overlap depth allows, hand out the last step's
    outputs (while the next step runs), then sleep until a result, a command or a failure arrives.

    When the group fails, all its ranks are ended and started again, and every unfinished request goes on from the
    tokens that were handed out: nobody's stream shows more than a pause (see `recovery`). Commands are taken meanwhile;
    `recovering` tells other threads.

    `on_outputs` and `on_failure` are called in the driver's thread. `on_failure` is called once, when the group cannot
    go on: every rank is killed and the placement group removed; `failure` tells other threads.
    """

    def __init__(
        self,
        group: WorkerGroup | InprocGroup,
        scheduler: Scheduler,
        step_timeout: float,
        integrity_interval: int,
        on_outputs: Callable[[StepOutputs], None],
        on_failure: Callable[[EngineError], None],
        budget: StartBudget | None = None,
        compile_timeout: float = 0.0,
        recorder: FlightRecorder | NoRecorder | None = None,
    ) -> None:
        self._group = group
        self._scheduler = scheduler
        self._integrity_interval = integrity_interval
        self._on_outputs = on_outputs
        self._on_failure = on_failure
        self._commands: deque[Callable[[], None]] = deque()
        self._watchdog = Watchdog(step_timeout, compile_timeout)
        self._in_flight = self._watchdog.in_flight
        self._probes = 0
        self._outputs: list[StepOutputs] = []  # of results that arrived, to be handed out
        self._budget = budget or StartBudget(0, 1.0)
        self._suspects = Suspects()
        self._interrupted = Interrupted()
        self._settled = False  # the group knows that nobody waits for its last start any more
        self._recorder = recorder or NoRecorder()
        self._woken = threading.Event()  # for the waits in which the group cannot be polled
        self.steps = 0  # answered so far
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)
        self.step_seconds = Histogram(STEP_BOUNDS)  # from when a step could begin to its answer
        self.failure: EngineError | None = None
        self.recovering: str | None = None  # why the ranks are being started again
        self.recoveries = 0
        self.integrity_violations = 0
        self.last_recoveries: deque[Recovery] = deque(maxlen=_KEPT_RECOVERIES)
        self.last_progress = time.monotonic()  # when a step or a probe was last answered

    @property
    def overdue(self) -> float:
        """Seconds since a step or probe was last answered, without those that the step in flight should take."""
        return time.monotonic() - self.last_progress - self._watchdog.expected

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        """Have `command` called in the driver's thread, before the next step is planned. Thread-safe."""
        self._commands.append(command)
        self._group.wake()
        self._woken.set()

    def close(self) -> None:
        """Stop serving and end the ranks; unfinished requests get EngineClosedError. Thread-safe, returns when done."""
        self.post(self._close)
        self._thread.join()

    def _close(self) -> None:
        self._closing = True

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._serve()
                except EngineDeadError as error:
                    self._recover(error)
            self._end(EngineClosedError("the engine was shut down"), report=self._scheduler.has_work)
        except EngineDeadError as error:
            self._end(error)
        except Exception as error:
            logger.exception("the driver loop failed")
            failure = EngineDeadError(f"the driver loop failed: {type(error).__name__}: {error}")
            self._recorder.save(str(failure))
            self._end(failure)

    def _serve(self) -> None:
        while not self._closing:
            self._obey()
            if self._closing:
                return
            self._plan()
            self._deliver()
            if not (self._settled or self._interrupted):
                self._settled = True
                self._group.settled()
            if not self._in_flight and self._scheduler.has_work and not self._commands and self._suspects.alone is None:
                raise RuntimeError("the scheduler has work but plans nothing (a bug: please report it)")
            left = self._time_to_wait()
            arrived = self._group.poll(max(left, LAST_LOOK))
            if left <= 0 and not arrived:
                raise EngineDeadError(self._watchdog.hang())
            self._receive(arrived)

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _plan(self) -> None:
        if self._suspects.alone is not None:
            self._review_suspects()
        while (plan := self._scheduler.schedule()) is not None:
            self._recorder.plan(plan)
            self._group.send_plan(plan)
            self._watchdog.sent(plan, time.monotonic())

    def _deliver(self) -> None:
        outputs, self._outputs = self._outputs, []
        outputs.append(self._scheduler.take_outputs())
        for output in outputs:
            if len(output):
                self._on_outputs(output)
                self._interrupted.heard_of(output.request_ids)

    def _receive(self, arrived: list[StepResult | tuple[int, Pong]]) -> None:
        for item in arrived:
            if isinstance(item, StepResult):
                if self._integrity_interval and (self.steps + 1) % self._integrity_interval == 0:
                    self._check_pages()
                self._outputs.append(self._scheduler.process(item))
                self._recorder.result(item)
                now = time.monotonic()
                self.step_seconds.observe(self._watchdog.answered(now, self.last_progress))
                self.last_progress = now
                self.steps += 1
                self._budget.step_answered()
            elif self._watchdog.probe is not None and self._watchdog.probe.answered(*item):
                self._watchdog.probe = None
                self.last_progress = time.monotonic()

    def _check_pages(self) -> None:
        """Before a result is handed out: whoever may have got wrong K/V ends here, the others start afresh."""
        try:
            self._scheduler.check_pages()
        except IntegrityError as error:
            self.integrity_violations += 1
            self._recorder.save(f"integrity violation: {error}")
            ended = self._scheduler.flush(
                error.pages, f"the KV cache was found corrupted where this request is ({error}): its text may be wrong"
            )
            logger.error("the KV cache is corrupted: %s; it was emptied, and requests %s were ended", error, ended)

    def _time_to_wait(self) -> float:
        """Seconds until the watchdog or the next probe is due, not positive if an answer is late; sends a probe that is
        due."""
        now = time.monotonic()
        if not self._in_flight and self._watchdog.probe is None:
            due = self.last_progress + PROBE_INTERVAL
            if due > now:
                return due - now
            self._probes += 1
            self._watchdog.probe = Probe(self._probes, self._group.size, now)
            self._group.ping(self._probes)
        return self._watchdog.deadline(self.last_progress) - now

    # -- recovery --------------------------------------------------------------------------------------------------

    def _recover(self, failure: EngineDeadError) -> None:
        """Start the group again and put every unfinished request back in line; returns also when closing.

        Raises:
            EngineDeadError: the budget has no start left.
        """
        failed, stopped, starts = time.monotonic(), 0.0, 0
        self._recorder.save(str(failure))
        self.recovering = str(failure)
        self._forget_steps(failure)
        error: Exception = failure
        while not self._closing:
            delay = self._budget.take()
            if delay is None:
                raise self._given_up(failure, error)
            logger.warning("%s; the ranks start again%s", error, f" in {delay:g} s" if delay else "")
            restart = self._restart(delay)
            starts += 1
            stopped = stopped or restart.stopped
            if restart.error is None:
                self._resume(
                    Recovery(str(failure), failed, stopped, time.monotonic(), starts, restart.timeline.seconds)
                )
                return
            error = restart.error

    def _restart(self, delay: float) -> GroupRestart:
        """One start, during which commands are taken."""
        restart = GroupRestart(self._group, delay, self._woken.set)
        try:
            while not restart.done and not self._closing:
                self._woken.wait()
                self._woken.clear()
                self._obey()
                self._deliver()
        finally:
            if not restart.done:  # closing, or a command raised: the group must be nobody else's before it is ended
                restart.cancel()
        return restart

    def _resume(self, recovery: Recovery) -> None:
        self.last_recoveries.append(recovery)
        self.recoveries += 1
        self.last_progress = recovery.ready
        self.recovering = None
        self._settled = False
        logger.warning("the ranks run again: %s", recovery)

    def _given_up(self, failure: EngineDeadError, last: Exception) -> EngineDeadError:
        if not self._budget.limit:
            return failure
        cause = str(failure) if last is failure else f"{failure}; and then: {last}"
        return EngineDeadError(
            f"{cause}; given up after {self._budget.limit} starts within {self._budget.window:g} s (max_recoveries, "
            "recovery_window)"
        )

    def _forget_steps(self, error: EngineDeadError) -> None:
        """Hand out what arrived, drop what was in flight, and see who may have caused the failure."""
        poison = self._suspects.failed(self._scheduler.requests_in_flight())
        self._watchdog.forget()
        running = self._scheduler.requests_with_row()
        self._scheduler.recover()
        self._recorder.restart()
        if poison is not None:
            self._budget.cause_removed()
            self._scheduler.fail_poison(
                poison, f"the workers fail whenever this request runs, also when it runs alone; it was ended: {error}"
            )
            logger.error("request %d was ended, since the ranks fail whenever it runs", poison)
        self._review_suspects()
        self._deliver()
        self._interrupted.failed(request for request in running if self._scheduler.known_len(request) is not None)

    def _review_suspects(self) -> None:
        self._suspects.review(self._scheduler.known_len)
        self._scheduler.run_only(self._suspects.alone)

    def _end(self, error: EngineError, report: bool = True) -> None:
        """The end of the group and of the engine with it."""
        self.failure = error
        try:
            if report:
                logger.log(logging.INFO if isinstance(error, EngineClosedError) else logging.ERROR, "%s", error)
                self._on_failure(error)
        except Exception:
            logger.exception("on_failure raised")
        finally:
            self._group.stop(**({} if isinstance(error, EngineClosedError) else {"grace": 0.0}))
            self._recorder.close()
        while self._commands:  # whoever waits for an answer gets one
            try:
                self._commands.popleft()()
            except Exception:  # an error in the middle of planning may have left the scheduler in two minds
                logger.debug("a command after the end failed", exc_info=True)
