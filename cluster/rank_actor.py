"""The worker actor: one process per rank, one long-lived `run` call, fed over ZeroMQ."""

from __future__ import annotations

import importlib
import logging
import os
import queue
import threading
from collections.abc import Callable

import ray

from cluster import messages
from cluster.errors import TransportError
from cluster.rank_startup import PendingStep, RankSpec, Runner, RunnerFactory, Startup, Whereabouts
from cluster.transport import RankPort
from scheduler.step import StepPlan, StepResult
from worker.errors import ModelError

logger = logging.getLogger(__name__)

_LINGER = 5.0  # seconds that a last message may take to leave


class RankActor:
    """Made into a Ray actor by `WorkerGroup`."""

    def whereabouts(self) -> Whereabouts:
        context = ray.get_runtime_context()
        gpus = tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", ()))
        return Whereabouts(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), gpus)

    def prepare(self, modules: tuple[str, ...], cards: tuple[str, ...]) -> Whereabouts:
        """Import what a run will need; nothing of `cards` is used yet."""
        _show_cards(cards)  # before anything asks CUDA: Ray chooses none for an actor without a share of a card
        for module in modules:
            importlib.import_module(module)
        return self.whereabouts()

    def run(self, spec: RankSpec, make_runner: RunnerFactory) -> None:
        """Serve until the driver says stop. Returns also after a failure, which was reported as a message by then."""
        rank = spec.worker.tp_rank
        logging.basicConfig(
            level=logging.INFO, format=f"[rank {rank}/{spec.worker.tp_size}] %(levelname)s %(message)s", force=True
        )
        if spec.worker.device == "cuda":
            _take_normal_priority()
        _show_cards(spec.visible_gpus)
        port = RankPort(spec.address)
        startup = Startup(spec, port)
        try:
            runner, barrier = startup.run(make_runner)
            StepLoop(port, runner, barrier, threaded=spec.worker.device == "cuda", sends=rank == 0).run()
        except Exception as error:
            port.send(_failed(startup.phase, error))
        finally:
            port.close(_LINGER)


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
            self._results.send_multipart((messages.CONTROL, messages.encode(_failed("serving", error))))

    def _send(self, result: StepResult) -> None:
        self._results.send_multipart((messages.RESULT, result.encode()))


def _show_cards(cards: tuple[str, ...]) -> None:
    """Let this process see these cards and no other; read when CUDA starts, which is later. (): as Ray set it."""
    if cards:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards)


def _take_normal_priority() -> None:
    """Ray starts workers at nice 15, and this thread has a GPU wait whenever it waits for a core."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:  # it takes root or CAP_SYS_NICE to go back up
        logger.info("the rank runs at nice %d: start Ray with RAY_worker_niceness=0 to change that", os.nice(0))


def _failed(phase: str, error: Exception) -> messages.Failed:
    """The message for `error`. What no user caused goes into the rank's log with its stack trace as well."""
    if isinstance(error, ValueError) and phase != "serving":
        return messages.Failed(phase, "model" if isinstance(error, ModelError) else "config", str(error))
    if isinstance(error, TransportError):
        return messages.Failed(phase, "error", str(error))
    logger.error("failed in phase %s", phase, exc_info=error)
    hint = ""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        hint = " (lower num_pages, max_running_requests or max_step_tokens, or raise tp_size)"
    return messages.Failed(phase, "error", f"{type(error).__name__}: {error}{hint}")
