"""`Alone`: what a request gives when nothing else exists: one rank in this process, one step at a time, naive cache.

The definition that every scheduled run on real ranks is held against.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from scheduler.config import SchedulerConfig
from scheduler.outputs import FinishReason
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.step import StepPlan
from tests.checkpoints import load_reference
from tests.references import score_gap
from worker.config import WorkerConfig
from worker.parallel import TPGroup
from worker.runner import ModelRunner

TIE = 1e-4
PAGE_SIZE = 16


@dataclass(frozen=True)
class AloneOutput:
    tokens: list[int]
    finish: FinishReason


@dataclass
class Comparison:
    """How many outputs were compared, and how many of them differ from a tie on."""

    outputs: int = 0
    tokens: int = 0
    ties: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.outputs} outputs, {self.tokens} tokens compared; {len(self.ties)} ties {self.ties}"


class Alone:
    """Runs requests one by one on the model at `path` and remembers what they gave."""

    def __init__(self, path: Path, max_seq_len: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        torch.set_num_threads(1)
        self.compared = Comparison()
        self._path = path
        self._outputs: dict[tuple, AloneOutput] = {}
        pages = -(-max_seq_len // PAGE_SIZE)
        self._config = SchedulerConfig(
            pages, PAGE_SIZE, 1, max_seq_len, max_seq_len, cache_type="naive", overlap_depth=1,
            eos_token_ids=eos_token_ids,
        )  # fmt: skip
        self._runner = ModelRunner(
            WorkerConfig(
                str(path), page_size=PAGE_SIZE, max_running_requests=1, max_seq_len=max_seq_len,
                max_step_tokens=max_seq_len,
            ),
            TPGroup.single(),
        )  # fmt: skip
        self._runner.load()
        self._runner.allocate(pages)

    def run(self, request: Request) -> AloneOutput:
        """The output of a request like this one. `request` itself is not touched."""
        constraint = None if request.constraint is None else request.constraint.fresh()
        held_to = None if constraint is None else constraint.settings
        key = (request.prompt_ids.tobytes(), request.prompt_len, request.sampling.model_dump_json(), held_to)
        if key not in self._outputs:
            copy = Request(
                1, request.prompt_ids, request.sampling, prompt_len=request.prompt_len, constraint=constraint
            )
            self._outputs[key] = self._generate(copy)
        return self._outputs[key]

    def compare(self, request: Request, tokens: list[int], finish: FinishReason | None = None) -> None:
        """Raises AssertionError unless `tokens` are those that the request gives alone, up to a tie.

        `finish` None: the request was cut short, `tokens` must be how its output starts. A difference is a tie, and
        counted, where the two tokens' perturbed scores lie within `TIE`; what follows it is not compared.
        """
        alone = self.run(request)
        expected = alone.tokens if finish is not None else alone.tokens[: len(tokens)]
        self.compared.outputs += 1
        pairs = list(zip(tokens, expected, strict=False))
        at = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
        self.compared.tokens += len(pairs) if at is None else at
        if at is not None:
            gap = self._gap(request, expected[:at], *pairs[at])
            assert gap <= TIE, f"token {at} is {tokens[at]}, alone {expected[at]}; scores {gap} apart"
            self.compared.ties.append(gap)
            return
        assert len(tokens) == len(expected)
        assert finish in (None, alone.finish)

    @cached_property
    def _reference(self) -> torch.nn.Module:
        return load_reference(self._path)

    def _gap(self, request: Request, before: list[int], one: int, other: int) -> float:
        sampling = request.sampling
        plain = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0, 0, 1)
        assert plain and not sampling.logit_bias, f"{one} instead of {other}; scores with penalties are not looked at"
        prefix = request.prompt_ids.tolist() + before
        return score_gap(self._reference, prefix, sampling.temperature, sampling.seed, one, other)

    def _generate(self, request: Request) -> AloneOutput:
        scheduler = Scheduler(self._config)
        scheduler.validate(request)
        scheduler.add(request)
        tokens: list[int] = []
        finish = FinishReason.NONE
        while scheduler.has_work:
            outputs: list[Any] = [scheduler.take_outputs()]
            plan = scheduler.schedule()
            if plan is not None:
                outputs.append(scheduler.process(self._runner.launch(StepPlan.decode(plan.buffer.copy())).result()))
            outputs.append(scheduler.take_outputs())
            for output in outputs:
                if output is None or not len(output):
                    continue
                assert not output.errors
                tokens += [token for token in output.tokens.tolist() if token >= 0]
                finish = FinishReason(max(finish, *output.finish.tolist()))
        return AloneOutput(tokens, finish)
