"""Runner factories: the product's runner on a real model, with a step that goes wrong on one rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cluster.rank_startup import PendingStep, RankSpec, Runner, RunnerFactory, Startup, make_model_runner
from cluster.settings import group_config
from scheduler.step import S, StepPlan


def use_runner(monkeypatch: pytest.MonkeyPatch, factory: RunnerFactory) -> None:
    """Engines that start from now on make their runners with `factory`."""
    monkeypatch.setattr(
        "cluster.engine.group_config", lambda *settings: replace(group_config(*settings), make_runner=factory)
    )


def go_wrong(how: str) -> None:
    if how == "raise":
        raise RuntimeError("forward failed")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


class FaultyRunner:
    """Calls `before_step` with each plan; everything else is the real runner's."""

    def __init__(self, runner: Runner, before_step: Callable[[StepPlan], None]) -> None:
        self._runner = runner
        self._before_step = before_step

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> PendingStep:
        self._before_step(plan)
        return self._runner.launch(plan)


@dataclass(frozen=True)
class FailOnce:
    """The `step`th step of `rank`, or a later one, goes wrong once; once more when the file `mark` is removed."""

    mark: Path
    rank: int
    step: int
    how: str = "raise"

    def __call__(self, spec: RankSpec, startup: Startup) -> tuple[Runner, Callable[[], None]]:
        runner, barrier = make_model_runner(spec, startup)
        if spec.worker.tp_rank != self.rank:
            return runner, barrier
        steps = iter(range(1, 1 << 30))

        def before_step(plan: StepPlan) -> None:
            if next(steps) >= self.step and not self.mark.exists():
                self.mark.touch()
                go_wrong(self.how)

        return FaultyRunner(runner, before_step), barrier


@dataclass(frozen=True)
class Poison:
    """Requests with one of `seeds` break `rank` whenever they have `tokens` generated tokens or more."""

    seeds: tuple[int, ...]
    rank: int
    tokens: int = 0
    how: str = "raise"
    inner: RunnerFactory = make_model_runner

    def __call__(self, spec: RankSpec, startup: Startup) -> tuple[Runner, Callable[[], None]]:
        runner, barrier = self.inner(spec, startup)
        if spec.worker.tp_rank != self.rank:
            return runner, barrier
        breaks_from: dict[int, int] = {}  # row -> device_len

        def before_step(plan: StepPlan) -> None:
            for entry in plan.sampling:
                breaks_from.pop(int(entry[S.ROW]), None)
                if int(entry[S.SEED_LOW]) in self.seeds:
                    breaks_from[int(entry[S.ROW])] = int(entry[S.PROMPT_LEN]) + self.tokens
            rows = zip(plan.rows[: plan.num_rows].tolist(), plan.device_len.tolist(), strict=False)
            if any(device_len >= breaks_from.get(row, 1 << 30) for row, device_len in rows):
                go_wrong(self.how)

        return FaultyRunner(runner, before_step), barrier
