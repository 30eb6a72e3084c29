"""A runner without a model, for tests of everything around it: placement, transport, driver, life and death."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from cluster.rank_startup import RankSpec, Startup
from cluster.worker_group import GroupConfig
from scheduler.config import SchedulerConfig
from scheduler.fake_model import FakeModel
from scheduler.fake_worker import FakeWorker
from scheduler.step import StepPlan, StepResult
from worker.config import WorkerConfig
from worker.errors import ModelError

VOCAB_SIZE = 32000
MAX_SEQ_LEN = 512


class FakePending:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class FakeRunner:
    """Checks every slot of every plan, and samples hashes of the content."""

    def __init__(self, worker: WorkerConfig, faults: Faults) -> None:
        self._worker = worker
        self._faults = faults
        self._steps = 0
        self.model_info = SimpleNamespace(
            vocab_size=VOCAB_SIZE, max_seq_len=worker.max_seq_len or MAX_SEQ_LEN, eos_token_ids=(), dtype="float32"
        )

    def load(self) -> None:
        if self._faults.load_error == self._worker.tp_rank:
            raise ModelError("no tensor model.norm.weight in the checkpoint")
        if self._faults.load_crash == self._worker.tp_rank:
            raise RuntimeError("something broke")
        if self._faults.load_hang == self._worker.tp_rank:
            time.sleep(600)

    def max_pages(self) -> int:
        return 1000

    def allocate(self, num_pages: int) -> None:
        worker = self._worker
        config = SchedulerConfig(
            num_pages=num_pages,
            page_size=worker.page_size,
            max_running_requests=worker.max_running_requests,
            max_seq_len=self.model_info.max_seq_len,
            max_step_tokens=worker.max_step_tokens,
        )
        self._worker_of_steps = FakeWorker(config, FakeModel(VOCAB_SIZE))

    def warm_up(self) -> tuple[int, ...]:
        return ()

    def launch(self, plan: StepPlan) -> FakePending:
        self._steps += 1
        here = self._faults.rank == self._worker.tp_rank and self._steps == self._faults.step
        if here and self._faults.kind == "raise":
            raise RuntimeError("forward failed")
        if here and self._faults.kind == "hang":
            time.sleep(600)
        return FakePending(self._worker_of_steps.execute(plan))


@dataclass(frozen=True)
class Faults:
    """What goes wrong, where and when; -1: nowhere. `kind` "raise" or "hang" happens to `rank` at its `step`th step."""

    load_error: int = -1
    load_crash: int = -1
    load_hang: int = -1
    rank: int = -1
    step: int = 1
    kind: str = "raise"

    def __call__(self, spec: RankSpec, startup: Startup) -> tuple[FakeRunner, Callable[[], None]]:
        """A `RunnerFactory`."""
        return FakeRunner(spec.worker, self), lambda: None


def fake_group_config(tp_size: int, faults: Faults = Faults(), **worker: object) -> GroupConfig:
    return GroupConfig(
        worker=WorkerConfig(model_path="", tp_size=tp_size, max_seq_len=MAX_SEQ_LEN, **worker),
        resources={"CPU": 1.0},
        backend="gloo",
        placement_timeout=60.0,
        start_timeout=60.0,
        step_timeout=30.0,
        make_runner=faults,
    )
