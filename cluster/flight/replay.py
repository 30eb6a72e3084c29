"""A recording, checked slot by slot without a model, and run again on fresh workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cluster.errors import EngineDeadError, RecordingError
from cluster.flight.recording import Recording
from scheduler.config import SchedulerConfig
from scheduler.fake_worker import FakeWorker, FakeWorkerError
from scheduler.step import StepPlan, StepResult


class RecordedWorker(FakeWorker):
    """Checks every slot of plans, and draws the tokens that it is told."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.tokens = np.empty(0, dtype=np.int32)

    def _draw(self, plan: StepPlan, rows: np.ndarray, positions: np.ndarray, contents: np.ndarray) -> np.ndarray:
        return self.tokens


def find_wrong_slot(recording: Recording) -> str | None:
    """What the first plan that reads or writes a wrong slot does, beginning "step k:"; None if none does.

    Without recorded tokens all look the same, so a slot that holds another sequence's token at the right position
    passes.
    """
    engine = recording.engine
    sizes = ("num_pages", "page_size", "max_running_requests", "max_seq_len", "max_step_tokens")
    worker = RecordedWorker(SchedulerConfig(**{name: engine[name] for name in sizes}))
    plans: Iterator[tuple[StepPlan, np.ndarray | None]] = iter(
        [*((plan, None) for plan in recording.snapshot), *((step.plan, step.tokens) for step in recording.steps)]
    )
    for plan, tokens in plans:
        worker.tokens = np.zeros(plan.num_samples, dtype=np.int32) if tokens is None else tokens
        try:
            worker.execute(plan)
        except FakeWorkerError as error:
            return str(error)
        except IndexError as error:
            return f"step {plan.step_id}: names what does not exist: {error}"
    return None


class Group(Protocol):
    """What a replay needs of a started `WorkerGroup` or `InprocGroup`."""

    def send_plan(self, plan: StepPlan) -> None: ...
    def poll(self, timeout: float | None) -> list: ...


@dataclass(frozen=True)
class Difference:
    """A token that came out otherwise."""

    step: int
    row: int
    position: int
    recorded: int
    replayed: int

    def __str__(self) -> str:
        return (
            f"step {self.step}: row {self.row} got token {self.replayed} at position {self.position}, "
            f"{self.recorded} was recorded"
        )


@dataclass
class Outcome:
    """steps, tokens: compared; differing: tokens that differ; first: the first of them, None if all agree."""

    steps: int = 0
    tokens: int = 0
    differing: int = 0
    first: Difference | None = None
    seconds: float = 0.0


def check_replayable(recording: Recording) -> None:
    """Raises RecordingError, with the reason, for a recording that cannot be run."""
    if not recording.with_tokens:
        raise RecordingError(
            "this recording holds no token ids, so it cannot be run again: start the server with --record-tokens to "
            "have them recorded; raydix replay --inspect shows the steps' shapes, slots and times"
        )
    if recording.broken is not None:
        raise RecordingError(f"this recording has no snapshot to begin with: {recording.broken}")
    if not recording.steps:
        raise RecordingError("this recording holds no step")


def replay(
    recording: Recording, group: Group, timeout: float, on_step: Callable[[int], None] = lambda done: None
) -> Outcome:
    """Run the snapshot and every step, and compare the sampled tokens with the recorded ones.

    A row whose token differs goes on from its own token, so more differ later; the first one counts.

    Raises:
        RecordingError: see `check_replayable`. EngineDeadError: a rank failed, or took `timeout` seconds for a step.
    """
    check_replayable(recording)
    began, outcome = time.monotonic(), Outcome()
    for plan in recording.snapshot:
        _run(group, plan, timeout)
    for step in recording.steps:
        plan = step.plan
        tokens = _run(group, plan, timeout).tokens
        if step.tokens is not None:
            outcome.steps += 1
            outcome.tokens += len(tokens)
            wrong = np.flatnonzero(tokens != step.tokens)
            outcome.differing += len(wrong)
            if len(wrong) and outcome.first is None:
                at = int(wrong[0])
                entry = int(plan.sample[at])
                place = int(plan.rows[entry]), int(plan.device_len[entry])
                outcome.first = Difference(plan.step_id, *place, int(step.tokens[at]), int(tokens[at]))
        on_step(outcome.steps)
    outcome.seconds = time.monotonic() - began
    return outcome


def _run(group: Group, plan: StepPlan, timeout: float) -> StepResult:
    group.send_plan(plan)
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        for item in group.poll(left):
            if isinstance(item, StepResult):
                return item
    raise EngineDeadError(f"no answer to step {plan.step_id} for {timeout:g} s: a rank hangs")
