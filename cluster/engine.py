"""`Engine`: one model copy, from settings to a running group. The object that `LLM` and the Serve replica hold."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from cluster import ray_runtime
from cluster.config import EngineConfig
from cluster.driver import Driver
from cluster.driver_query import Answer, ask_driver
from cluster.engine_info import EngineInfo
from cluster.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    RecordingError,
    StartupError,
)
from cluster.fake_runner import FakeRunner
from cluster.flight import FlightRecorder, NoRecorder
from cluster.flight.recording import write_into
from cluster.grammar_compiler import GrammarCompiler
from cluster.inproc_group import InprocGroup
from cluster.model_files import resolve_model
from cluster.progress import Progress, no_progress
from cluster.recovery import Recovery, StartBudget
from cluster.request_timings import RequestTimings
from cluster.settings import (
    choose_device,
    effective_config,
    flight_recorder,
    group_config,
    make_digest,
    scheduler_config,
)
from cluster.timeline import Timeline
from cluster.tokenizer import Tokenizer, load_tokenizer
from cluster.worker_group import WorkerGroup
from kvcache import NodeSummary, PrefixDigest
from kvcache.digest import DigestReading
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.request import InvalidRequest, Request
from scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests with one group of ranks. Methods are thread-safe unless they say otherwise.

    `on_outputs` gets each step's new tokens as arrays; `on_failure` is called at most once, when the engine can serve
    no more: every unfinished request has failed then. Both are called in the driver's thread and must be quick.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_outputs: Callable[[StepOutputs], None],
        on_failure: Callable[[EngineError], None],
    ) -> None:
        self.config = config
        self._info: EngineInfo | None = None
        self.tokenizer: Tokenizer | None = None
        self._on_outputs = on_outputs
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._unfinished: set[int] = set()
        self._timings = RequestTimings()
        self._closed = False
        self._runtime: ray_runtime.RayRuntime | None = None
        self.grammars: GrammarCompiler | None = None
        self._scheduler: Scheduler | None = None
        self._digest: PrefixDigest | None = None
        self._group: WorkerGroup | InprocGroup | None = None
        self._driver: Driver | None = None
        self._recorder: FlightRecorder | NoRecorder = NoRecorder()

    def start(self, progress: Progress = no_progress, min_cpus: int = 0) -> EngineInfo:
        """Connect to Ray, start the ranks and the driver loop; returns when the engine is ready. Call it once.

        `min_cpus`: what a private Ray offers at least, for callers that place more than the ranks.

        Raises:
            ConfigError, ModelLoadError: a setting or the checkpoint is wrong.
            StartupError, PlacementError: the group did not come up. Nothing is left running then.
        """
        timeline = Timeline(progress)
        try:
            timeline.enter("model files")
            path = resolve_model(self.config.model, progress, self.config.cache_dir, self.config.load_format == "dummy")
            may_grow = False
            if self.config.executor == "ray":
                timeline.enter("ray")
                self._runtime = ray_runtime.connect(self.config.ray_address, max(min_cpus, self.config.tp_size))
                may_grow = self._runtime.may_grow
            device = choose_device(self.config, on_ray=self._runtime is not None)
            timeline.enter("tokenizer")
            self.tokenizer = load_tokenizer(path)
            settings = group_config(self.config, path, device, may_grow)
            fake = FakeRunner(settings.worker, self.config.fake_tokens_per_s) if device == "fake" else None
            self._group = WorkerGroup(settings) if self._runtime else InprocGroup(settings.worker, fake)
            group = self._group.start(timeline)
            eos = self.tokenizer.eos_token_ids if self.tokenizer else group.eos_token_ids
            self.grammars = GrammarCompiler(self.tokenizer, group.vocab_size, tuple(eos))
            self._digest = make_digest(self.config)
            self._scheduler = Scheduler(scheduler_config(self.config, group, tuple(eos)), self._digest)
            effective = effective_config(self.config, path, device, group)
            self._recorder = flight_recorder(effective, self._scheduler)
            self._driver = Driver(
                self._group,
                self._scheduler,
                self.config.step_timeout,
                self.config.integrity_interval,
                self._handle_outputs,
                self._on_failure,
                StartBudget(self.config.max_recoveries if self._runtime else 0, self.config.recovery_window),
                self.config.compile_timeout if device == "cuda" else 0.0,
                self._recorder,
            )
        except BaseException as error:
            if self._group is not None:
                self._group.stop(grace=0.0)
            self._release_ray(keep_logs=isinstance(error, StartupError))
            raise
        timeline.finish()
        self._info = EngineInfo(effective, path, group.vocab_size, tuple(eos), group.ranks, timeline.seconds)
        self._driver.start()
        logger.info("ready: %s\n%s", timeline, self._info)
        return self.info

    @property
    def info(self) -> EngineInfo | None:
        """What the engine is; None before it was ready."""
        if self._info is not None and self._info.ranks is not self._group.info.ranks:
            self._info = replace(self._info, ranks=self._group.info.ranks)
        return self._info

    @property
    def recovering(self) -> str | None:
        """While the ranks are being started again: why. Requests are accepted, and wait."""
        return self._driver.recovering if self._driver is not None and self._driver.failure is None else None

    @property
    def last_recoveries(self) -> list[Recovery]:
        """The latest recoveries, oldest first."""
        return list(self._driver.last_recoveries)

    @property
    def failure(self) -> EngineError | None:
        """Why the engine cannot serve, or None."""
        return self._driver.failure if self._driver is not None else None

    def validate(self, request: Request) -> None:
        """Raises InvalidRequestError if `request` could never run here."""
        ids = request.prompt_ids
        if len(ids) and int(ids.max()) >= self.info.vocab_size:
            raise InvalidRequestError(
                f"prompt token id {int(ids.max())} is outside the model's vocabulary of {self.info.vocab_size}",
                "prompt",
            )
        outside = [token for token in request.sampling.logit_bias if token >= self.info.vocab_size]
        if outside:
            raise InvalidRequestError(
                f"logit_bias names token id {outside[0]}, outside the model's vocabulary of {self.info.vocab_size}",
                "logit_bias",
            )
        try:
            self._scheduler.validate(request)
        except InvalidRequest as error:
            raise InvalidRequestError(str(error)) from error

    def submit(self, request: Request) -> None:
        """Queue a request, whose id must be unique among unfinished ones. Outputs arrive through `on_outputs`.

        One with `structured_outputs` is prepared before, by `grammars`.

        Raises:
            InvalidRequestError: the request is wrong. OverloadedError: the queue is full.
            EngineDeadError, EngineClosedError: the engine serves no more.
        """
        self.validate(request)
        if not self.submit_many([request]):
            raise OverloadedError(f"{self._room} requests are running or waiting, which is the limit")

    def submit_many(self, requests: Sequence[Request]) -> int:
        """Queue as many of these validated requests as there is room for, to be planned together; how many that were.

        Raises:
            InvalidRequestError: an id is in use. EngineDeadError, EngineClosedError: the engine serves no more.
        """
        self._check_serving()
        with self._lock:
            taken = requests[: max(0, self._room - len(self._unfinished))]
            for request in taken:
                if request.request_id in self._unfinished:
                    raise InvalidRequestError(f"request id {request.request_id} is in use by an unfinished request")
            for request in taken:
                self._unfinished.add(request.request_id)
                self._timings.submitted(request)
        if taken:
            self._driver.post(partial(self._add, taken))
        return len(taken)

    def abort(self, request_id: int) -> None:
        """End a request early; its finish (ABORT) arrives like any other. An unknown id is ignored."""
        if self._driver is not None:
            self._driver.post(partial(self._scheduler.abort, request_id))

    def stats(self) -> dict[str, Any]:
        """Counters of the scheduler and the transport, as of the driver loop's current turn. Empty once it ended."""
        return self._in_driver(self._read_stats) or {}

    def read_digest(self, everything: bool) -> DigestReading | None:
        """What changed in the prefix cache since the last call, and all of it if `everything`.

        Empty where no digest is kept. None if the driver does not answer: changes may be lost then.
        """
        digest = self._digest
        return DigestReading.empty() if digest is None else self._in_driver(partial(digest.read, everything))

    def record_flight(self) -> Path:
        """Save what the flight recorder holds in a new file.

        Raises:
            RecordingError: the recorder is off, or the file cannot be written. EngineError: the engine does not answer.
        """
        if isinstance(self._recorder, NoRecorder):
            raise RecordingError("the flight recorder is off (flight_steps 0)")
        recording = self._in_driver(lambda: self._recorder.take("on request"))
        if recording is None:
            raise self.failure or EngineError("the engine does not answer")
        return write_into(self._recorder.directory, recording)

    def cache_summary(self, max_nodes: int) -> list[NodeSummary]:
        """A picture of the prefix cache, see `BasePrefixCache.summary`. Empty once the driver loop ended."""
        return self._in_driver(lambda: self._scheduler.cache.prefix_cache.summary(max_nodes)) or []

    def metrics(self) -> dict[str, Any]:
        """Totals and histograms of requests and steps since the start, as plain values; see `RequestTimings`."""
        return self._timings.snapshot() | {
            "step_seconds": self._driver.step_seconds.snapshot(),
            "recoveries": self._driver.recoveries,
            "integrity_violations": self._driver.integrity_violations,
        }

    def _in_driver(self, ask: Callable[[], Answer]) -> Answer | None:
        return None if self._driver is None else ask_driver(self._driver, ask)

    @property
    def overdue(self) -> float:
        """Seconds without an answered step or idle probe (one every few seconds), without a long step's own."""
        return self._driver.overdue

    def shutdown(self) -> None:
        """End the ranks, and Ray if this engine started it. Unfinished requests fail. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._driver is not None:
            self._driver.close()
        self._release_ray(keep_logs=isinstance(self.failure, EngineDeadError))

    # -- in the driver's thread ------------------------------------------------------------------------------------

    def _handle_outputs(self, outputs: StepOutputs) -> None:
        self._timings.step(outputs)
        if outputs.finish.any():
            with self._lock:
                self._unfinished.difference_update(outputs.request_ids[outputs.finish != FinishReason.NONE].tolist())
        self._on_outputs(outputs)

    def _read_stats(self) -> dict[str, Any]:
        return asdict(self._scheduler.stats()) | {
            "in_flight": self._scheduler.num_in_flight,
            "strangers": self._group.strangers,
        }

    # -- start and end ---------------------------------------------------------------------------------------------

    @property
    def _room(self) -> int:
        """Requests that may be unfinished at a time."""
        return self.config.max_running_requests + self.config.max_queued_requests

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._scheduler.add(request)

    def _check_serving(self) -> None:
        if self._closed or self._driver is None:
            raise EngineClosedError("the engine is not running")
        if self._driver.failure is not None:
            raise self._driver.failure

    def _release_ray(self, keep_logs: bool) -> None:
        if self._runtime is not None:
            logs = self._runtime.close(keep_logs)
            self._runtime = None
            if logs is not None:
                logger.error("Ray's logs are kept in %s", logs)
