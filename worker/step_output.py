"""What a step has for the driver, in one array on the device, and how to read it on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from scheduler.step import LogprobBlock, PlanExtras, PromptScores, R, SampledLogprobs, StepPlan, StepResult
from worker.sampling import SamplingMode
from worker.sampling.extras import expand_runs


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """Where things are in a step's words: its tokens, the log probabilities of those at `logprob_index` (None: of none)
    with `top` alternatives, the scores of `score_runs` (int32[r, 3]; None: none) with `score_top`.
    """

    num_samples: int
    logprob_index: np.ndarray | None = None
    top: int = 0
    score_runs: np.ndarray | None = None
    score_top: int = 0

    @classmethod
    def of(cls, plan: StepPlan, mode: SamplingMode) -> OutputLayout:
        """Holds no views of the plan."""
        extras = mode.extras
        index = extras.logprob_index if extras is not None and len(extras.logprob_index) else None
        top = 0 if index is None else extras.top
        if plan.extras is None or not len(plan.extras.score_runs):
            return cls(plan.num_samples, index, top)
        runs = plan.extras.score_runs
        return cls(plan.num_samples, index, top, runs[:, R.ROW : R.COUNT + 1].copy(), int(runs[:, R.TOP].max()))

    @property
    def is_plain(self) -> bool:
        """Nothing but tokens."""
        return self.logprob_index is None and self.score_runs is None

    def join(
        self, tokens: torch.Tensor | None, logprobs: torch.Tensor | None, scores: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The step's words: int32, tokens first; None if there are none. Padding may follow tokens that are alone."""
        if self.is_plain:
            return tokens
        parts = [] if tokens is None else [tokens[: self.num_samples]]
        return torch.cat(parts + [part.reshape(-1) for part in (logprobs, scores) if part is not None])

    def result(self, step_id: int, words: np.ndarray) -> StepResult:
        """Read what `join` made."""
        result = StepResult(step_id, words[: self.num_samples])
        at = self.num_samples
        if self.logprob_index is not None:
            width = 2 + 2 * self.top
            block = words[at : at + width * len(self.logprob_index)].reshape(-1, width)
            result.logprobs = SampledLogprobs(self.logprob_index, LogprobBlock(block))
            at += block.size
        if self.score_runs is not None:
            result.scores = PromptScores(self.score_runs, LogprobBlock(words[at:].reshape(-1, 2 + 2 * self.score_top)))
        return result


def score_inputs(plan: StepPlan, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the prompt tokens to score: the step's inputs that predict them (int64[n], numbers in batch order) and their
    ids (int32[n]), both on the device. `buffer` is the loaded plan."""
    host = plan.extras
    device = PlanExtras(buffer[len(buffer) - host.counts.words :], host.counts)
    columns = device.score_runs.unbind(1)
    runs = torch.stack((columns[R.ROW], columns[R.INPUT], columns[R.COUNT]), 1)
    _, inputs = expand_runs(runs, len(host.score_targets))
    return inputs, device.score_targets
