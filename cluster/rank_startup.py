"""A rank's start: connect, join the process group, load, allocate, warm up. The driver's side is `handshake`.

This module imports neither torch nor the model code before the import phase, so that the actor starts fast and a broken
installation is reported like any other start-up error, with rank and phase.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster import messages
from cluster.errors import TransportError
from cluster.ipc_directory import IPC_PREFIX
from cluster.transport import RankAddress, RankPort
from scheduler.step import StepPlan, StepResult
from worker.config import WorkerConfig

_CONNECT_TIMEOUT = 30.0
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
    """Everything a rank is told at its start. `start_timeout` bounds every wait until it is ready, in seconds.

    `visible_gpus`: ids of the cards to see, among which `worker.device_index` counts; see `visible_cards`.
    """

    group: str
    address: RankAddress
    worker: WorkerConfig
    backend: str
    node_ip: str
    start_timeout: float
    step_timeout: float
    visible_gpus: tuple[str, ...] = ()


RunnerFactory = Callable[["RankSpec", "Startup"], tuple[Runner, Callable[[], None]]]
"""Makes a rank's runner, and a function that waits until every rank has called it."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where an actor runs; `gpu_ids` as Ray assigned them."""

    node_id: str
    node_ip: str
    pid: int
    gpu_ids: tuple[str, ...]


def visible_cards(place: Whereabouts, places: Sequence[Whereabouts], nccl: bool) -> tuple[str, ...]:
    """Ids of the cards that the rank at `place` should see; (): it has none.

    With a card for each rank, those of all the node's ranks: cards map each other's memory only where both are
    visible. Otherwise its own.
    """
    neighbours = [other for other in places if other.node_id == place.node_id]
    cards = tuple(gpu for rank in neighbours for gpu in rank.gpu_ids)
    own = nccl and all(len(rank.gpu_ids) == 1 for rank in neighbours)
    return cards if own and len(set(cards)) == len(cards) else place.gpu_ids


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
            welcome = self._expect(messages.Welcome, min(_CONNECT_TIMEOUT, self.spec.start_timeout))
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
        use_interface_of(spec.node_ip)
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


def use_interface_of(node_ip: str) -> None:
    """Make gloo and NCCL use the network interface that carries the address Ray knows this node by.

    NCCL takes a name for a prefix (eth1 is also eth10) unless a "=" precedes it; gloo knows whole names only.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == node_ip for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            return
    raise TransportError(f"no network interface of this machine has the address {node_ip} that Ray knows it by")


def _exit_without_driver(address: RankAddress) -> None:
    """The driver is gone: end this process at once, whatever its main thread does, and remove what it left."""
    if address.endpoint.startswith("ipc://"):
        directory = Path(address.endpoint.removeprefix("ipc://")).parent
        if directory.name.startswith(IPC_PREFIX):
            shutil.rmtree(directory, ignore_errors=True)
    os._exit(_DRIVER_LOST_EXIT_CODE)
