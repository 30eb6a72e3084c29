"""`InprocGroup`: one rank inside the driver's process, without Ray and sockets. Shows what Ray costs (`--executor`)."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

from cluster.errors import ConfigError, EngineDeadError, ModelLoadError, StartupError
from cluster.fake_runner import FakeRunner
from cluster.handshake import GroupInfo
from cluster.messages import Pong
from cluster.rank_startup import Whereabouts
from cluster.timeline import Timeline
from scheduler.step import StepPlan, StepResult
from worker.config import WorkerConfig


class InprocGroup:
    """What `Driver` asks of a `WorkerGroup`, for one rank. `send_plan` launches the plan, in the driver's thread."""

    size = 1
    strangers = 0

    def __init__(self, worker: WorkerConfig, fake: FakeRunner | None = None) -> None:
        self.info: GroupInfo | None = None
        self._worker = worker
        self._fake = fake
        self._launched: queue.SimpleQueue = queue.SimpleQueue()  # PendingStep, or None to end the thread
        self._arrived: queue.SimpleQueue = (
            queue.SimpleQueue()
        )  # StepResult, (rank, Pong), Exception, or None: a wake-up
        self._thread: threading.Thread | None = None

    def start(self, timeline: Timeline) -> GroupInfo:
        """Load the model here; raises ConfigError, ModelLoadError, StartupError."""
        from worker.errors import ModelError
        from worker.parallel import TPGroup
        from worker.runner import ModelRunner

        phase = "load"

        def enter(name: str) -> None:
            nonlocal phase
            phase = name
            timeline.enter(name, 0, 0.0)

        try:
            if self._fake is not None:
                self._runner = self._fake
            else:
                self._runner = ModelRunner(
                    self._worker, TPGroup.single(), lambda what, share: timeline.enter(phase, 0, share)
                )
            enter("load")
            self._runner.load()
            enter("allocate")
            pages = self._worker.num_pages or self._runner.max_pages()
            self._runner.allocate(pages)
            enter("warm-up")
            sizes = self._runner.warm_up()
        except ModelError as error:
            raise ModelLoadError(str(error)) from error
        except ValueError as error:
            raise ConfigError(str(error)) from error
        except Exception as error:
            raise StartupError(f"rank 0 failed in phase {phase!r}: {type(error).__name__}: {error}") from error
        model = self._runner.model_info
        here = Whereabouts("", "127.0.0.1", os.getpid(), ())
        self.info = GroupInfo(
            pages, model.vocab_size, model.max_seq_len, tuple(model.eos_token_ids), model.dtype, tuple(sizes), (here,)
        )
        self._thread = threading.Thread(target=self._collect, name="results", daemon=True)
        self._thread.start()
        return self.info

    def settled(self) -> None:
        """There are no spare ranks in this process."""

    def send_plan(self, plan: StepPlan) -> None:
        """Launch a sealed plan."""
        try:
            self._launched.put(self._runner.launch(plan))
        except Exception as error:
            raise EngineDeadError(f"the rank failed: {type(error).__name__}: {error}") from error

    def ping(self, number: int) -> None:
        self._arrived.put((0, Pong(number)))

    def poll(self, timeout: float | None) -> list[StepResult | tuple[int, Pong]]:
        """What arrived within `timeout` seconds. Raises EngineDeadError when a step failed."""
        try:
            items = [self._arrived.get(timeout=timeout)]
        except queue.Empty:
            return []
        while not self._arrived.empty():
            items.append(self._arrived.get())
        for item in items:
            if isinstance(item, Exception):
                raise EngineDeadError(f"the rank failed: {type(item).__name__}: {item}") from item
        return [item for item in items if item is not None]

    def wake(self) -> None:
        """Make `poll` return. Thread-safe."""
        self._arrived.put(None)

    def stop(self, grace: float = 0.0) -> None:
        """Wait for what runs; memory is given back with the object."""
        if self._thread is not None:
            self._launched.put(None)
            self._thread.join()
            self._thread = None

    def _collect(self) -> None:
        put: Callable[[object], None] = self._arrived.put
        while (pending := self._launched.get()) is not None:
            try:
                put(pending.result())
            except Exception as error:
                put(error)


def cuda_is_available() -> bool:
    """Whether this process sees a card."""
    import torch

    return torch.cuda.is_available()
