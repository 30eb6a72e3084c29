"""The worker actor: one process per rank, one long-lived `run` call, fed over ZeroMQ.

This module imports neither torch nor the model code, so that the actor starts fast and a broken installation is
reported like any other start-up error, with rank and phase.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray

from cluster import messages
from cluster.errors import TransportError
from cluster.transport import IPC_PREFIX, RankAddress, RankPort
from scheduler.step import StepPlan, StepResult
from worker.config import WorkerConfig

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 30.0
LINGER = 5.0
_PROGRESS_INTERVAL = 0.1
_DRIVER_LOST_EXIT_CODE = 3


class PendingStep(Protocol):
    """A step that was launched; `result` waits for it."""

    def result(self) -> StepResult: ...


class Runner(Protocol):
    """What the loop needs of `worker.runner.ModelRunner`. Start-up calls the methods in this order, once each."""

    def load(self) -> None: ...
    def max_pages(self) -> int: ...
    def allocate(self, num_pages: int) -> None: ...
    def warm_up(self) -> list[int]: ...
    def launch(self, plan: StepPlan) -> PendingStep: ...
    @property
    def model_info(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Everything a rank is told at its start. `start_timeout` bounds every wait until it is ready, in seconds."""

    group: str
    address: RankAddress
    worker: WorkerConfig
    backend: str
    node_ip: str
    start_timeout: float
    step_timeout: float


RunnerFactory = Callable[["RankSpec", "Startup"], tuple[Runner, Callable[[], None]]]
"""Makes a rank's runner, and a function that waits until every rank has called it."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where an actor runs; `gpu_ids` as Ray assigned them."""

    node_id: str
    node_ip: str
    pid: int
    gpu_ids: tuple[str, ...]


class RankActor:
    """Made into a Ray actor by `WorkerGroup`."""

    def whereabouts(self) -> Whereabouts:
        context = ray.get_runtime_context()
        gpus = tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", ()))
        return Whereabouts(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), gpus)

    def run(self, spec: RankSpec, make_runner: RunnerFactory) -> None:
        """Serve until the driver says stop. Returns also after a failure, which was reported as a message by then."""
        rank = spec.worker.tp_rank
        logging.basicConfig(
            level=logging.INFO, format=f"[rank {rank}/{spec.worker.tp_size}] %(levelname)s %(message)s", force=True
        )
        port = RankPort(spec.address)
        startup = Startup(spec, port)
        try:
            runner, barrier = startup.run(make_runner)
            StepLoop(port, runner, barrier, threaded=spec.worker.device == "cuda", sends=rank == 0).run()
        except Exception as error:
            logger.debug("rank failed", exc_info=True)
            port.send(messages.Failed(startup.phase, _kind(error), _describe(error)))
        finally:
            port.close(LINGER)


class Startup:
    """A rank's way from connecting to ready. `phase` names where it is, for progress and for error messages."""

    def __init__(self, spec: RankSpec, port: RankPort) -> None:
        self.spec = spec
        self.phase = "connect"
        self._port = port
        self._deadline = time.monotonic() + spec.start_timeout
        self._last_progress = 0.0

    def run(self, make_runner: RunnerFactory) -> tuple[Runner, Callable[[], None]]:
        port, rank = self._port, self.spec.worker.tp_rank
        port.send(messages.Hello(messages.PROTOCOL_VERSION, self.spec.group, rank))
        try:
            welcome = self._expect(messages.Welcome, min(CONNECT_TIMEOUT, self.spec.start_timeout))
        except TransportError as error:
            raise TransportError(f"node {self.spec.node_ip} does not reach the driver: {error}") from error
        if welcome != messages.Welcome(messages.PROTOCOL_VERSION, self.spec.group):
            raise TransportError(f"the driver answered as {welcome}, not as group {self.spec.group}")
        port.watch_driver(lambda: _exit_without_driver(self.spec.address))
        self.enter("import")
        runner, barrier = make_runner(self.spec, self)
        self.enter("load")
        runner.load()
        info = runner.model_info
        self.enter("allocate")
        port.send(
            messages.Capacity(
                pages=runner.max_pages(),
                vocab_size=info.vocab_size,
                max_seq_len=info.max_seq_len,
                eos_token_ids=list(info.eos_token_ids),
                dtype=info.dtype,
            )
        )
        runner.allocate(self._expect(messages.Allocate).pages)
        self.enter("warm-up")
        sizes = runner.warm_up()
        self.enter("ready")
        port.send(messages.Ready(list(sizes)))
        self.phase = "serving"
        return runner, barrier

    def enter(self, phase: str) -> None:
        """Begin a phase; the driver hears of it."""
        self.phase = phase
        self._port.send(messages.Progress(phase, 0.0))

    def progress(self, what: str, fraction: float) -> None:
        """Progress within the phase, for a runner's callback; sends at most ten a second."""
        now = time.monotonic()
        if now - self._last_progress >= _PROGRESS_INTERVAL:
            self._last_progress = now
            self._port.send(messages.Progress(self.phase, float(fraction)))

    def offer_rendezvous(self, host: str, port: int) -> None:
        """Rank 0: tell the other ranks where the process group's store is."""
        self._port.send(messages.Rendezvous(host, port))

    def await_rendezvous(self) -> messages.Rendezvous:
        """The other ranks: where rank 0's store is."""
        return self._expect(messages.Rendezvous)

    @property
    def time_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _expect(self, kind: type, timeout: float | None = None) -> Any:
        frame, body = self._port.receive(self.time_left if timeout is None else timeout)
        message = messages.decode(body) if frame == messages.CONTROL else frame
        if isinstance(message, messages.Stop):
            raise TransportError("the driver stopped the start-up")
        if not isinstance(message, kind):
            raise TransportError(f"expected {kind.__name__} from the driver, got {message!r}")
        return message


class StepLoop:
    """Receives plans in order and launches them. Rank 0 also answers.

    With `threaded`, results are awaited and sent by a thread of their own, so that plan k + 1 is launched while k
    runs; where launching is computing (the CPU), the loop answers itself and saves the switch between threads.
    """

    def __init__(
        self, port: RankPort, runner: Runner, barrier: Callable[[], None], threaded: bool, sends: bool
    ) -> None:
        self._port = port
        self._runner = runner
        self._barrier = barrier
        self._results = port.result_socket() if sends else None
        self._pending: queue.SimpleQueue[PendingStep] | None = None
        if sends and threaded:
            self._pending = queue.SimpleQueue()
            threading.Thread(target=self._send_results, name="results", daemon=True).start()

    def run(self) -> None:
        """Until `Stop`. Raises what a step raises."""
        while True:
            kind, body = self._port.receive()
            if kind == messages.PLAN:
                pending = self._runner.launch(StepPlan.decode(body))
                if self._pending is not None:
                    self._pending.put(pending)
                elif self._results is not None:
                    self._send(pending.result())
                continue
            message = messages.decode(body)
            if isinstance(message, messages.Stop):
                return
            if isinstance(message, messages.Ping):
                self._barrier()
                self._port.send(messages.Pong(message.number))
            else:
                raise TransportError(f"unexpected message from the driver: {message!r}")

    def _send_results(self) -> None:
        try:
            while True:
                self._send(self._pending.get().result())
        except Exception as error:
            failed = messages.Failed("serving", _kind(error), _describe(error))
            self._results.send_multipart((messages.CONTROL, messages.encode(failed)))

    def _send(self, result: StepResult) -> None:
        self._results.send_multipart((messages.RESULT, result.encode()))


def make_model_runner(spec: RankSpec, startup: Startup) -> tuple[Runner, Callable[[], None]]:
    """The product's `RunnerFactory`: joins the process group and makes a `ModelRunner`."""
    import torch
    import torch.distributed as dist

    from worker.parallel import init_tp_group
    from worker.runner import ModelRunner

    worker = spec.worker
    if worker.device == "cpu":
        torch.set_num_threads(1)
    store = None
    if worker.tp_size > 1:
        startup.enter("process group")
        _use_interface_of(spec.node_ip)
        if worker.tp_rank == 0:
            store = dist.TCPStore(spec.node_ip, 0, worker.tp_size, is_master=True, wait_for_workers=False)
            startup.offer_rendezvous(spec.node_ip, store.port)
        else:
            place = startup.await_rendezvous()
            try:
                store = dist.TCPStore(place.host, place.port, worker.tp_size, is_master=False)
            except dist.DistError as error:
                raise TransportError(
                    f"node {spec.node_ip} does not reach rank 0 at {place.host}:{place.port}: {error}"
                ) from error
    device = torch.device("cuda", worker.device_index) if worker.device == "cuda" else torch.device("cpu")
    timeout = max(spec.step_timeout, startup.time_left)
    tp = init_tp_group(worker.tp_rank, worker.tp_size, device, store, timeout, backend=spec.backend)
    return ModelRunner(worker, tp, startup.progress), tp.barrier


def _use_interface_of(node_ip: str) -> None:
    """Make gloo and NCCL use the network interface that carries the address Ray knows this node by."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == node_ip for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return
    raise TransportError(f"no network interface of this machine has the address {node_ip} that Ray knows it by")


def _exit_without_driver(address: RankAddress) -> None:
    """The driver is gone: end this process at once, whatever its main thread does, and remove what it left."""
    if address.endpoint.startswith("ipc://"):
        directory = Path(address.endpoint.removeprefix("ipc://")).parent
        if directory.name.startswith(IPC_PREFIX):
            shutil.rmtree(directory, ignore_errors=True)
    os._exit(_DRIVER_LOST_EXIT_CODE)


def _kind(error: Exception) -> str:
    """Which class of the driver's error tree fits: "model", "config" or "error"."""
    try:
        from worker.errors import ModelError
    except ImportError:
        return "error"
    if isinstance(error, ModelError):
        return "model"
    return "config" if isinstance(error, ValueError) and not isinstance(error, TransportError) else "error"


def _describe(error: Exception) -> str:
    if isinstance(error, (ValueError, TransportError)):
        return str(error)
    hint = ""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        hint = " (out of memory: lower num_pages, max_running_requests, max_step_tokens, or raise tp_size)"
    return f"{type(error).__name__}: {error}{hint}"
