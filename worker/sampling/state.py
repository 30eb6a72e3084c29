"""Sampling parameters per table row: device tensors the sampler gathers from, and the host's copy that picks its path.

The host half never asks the device anything: both halves are filled from the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from scheduler.step import PlanExtras, S, StepPlan
from worker.sampling.extras import ExtrasMode, RowExtras
from worker.sampling.masks import StepMasks
from worker.sampling.noise import seed_keys

INITIAL_SUPPRESS_WIDTH = 8
LOWEST_TEMPERATURE = 1e-5
"""Below it a row is greedy, as at 0: scaled logits would leave the range of float32."""


@dataclass(frozen=True, slots=True)
class SamplingMode:
    """Which code a step needs, known on the host before anything runs.

    noisy           some row is not greedy; otherwise one arg-max is all
    num_filtered    rows that are not greedy and have top-k, top-p or min-p
    wide            some filtered row may keep more tokens than the exchanged candidate list holds
    wide_k          some row's top_k exceeds that list
    suppress        some row is still below its min_tokens
    extras          penalties, bias, log probabilities; None if no row uses any
    masked          some token may not be any id: its request follows a grammar
    """

    noisy: bool
    num_filtered: int
    wide: bool
    wide_k: bool
    suppress: bool
    extras: ExtrasMode | None = None
    masked: bool = False

    @property
    def is_plain(self) -> bool:
        """Greedy and temperature only: the paths that a captured graph runs."""
        changed = self.masked or (self.extras is not None and self.extras.changes_logits)
        return not (self.num_filtered or self.suppress or changed)


class SamplingState:
    """Parameters of `num_rows` rows and the dummy row (which is greedy). Indexed by table row.

    Device tensors, each [num_rows + 1]: `scale` float32 (1 / temperature, or 1 for greedy rows), `noise` float32 (1, or
    0 for greedy rows), `top_p`, `min_p` float32, `top_k` int64 (vocab_size where off), `filtered` bool, `seed_key`
    int64, `suppress_until` int32 (positions below it may not sample the row's `suppress_ids`, int32[.., width], -1 in
    unused places). `extras` holds what few requests use, `masks` those of the step that was applied last (None: it has
    none).
    """

    def __init__(self, num_rows: int, vocab_size: int, list_size: int, device: torch.device, extras: RowExtras) -> None:
        n = num_rows + 1
        self.extras = extras
        self.masks: StepMasks | None = None
        self.vocab_size, self.list_size = vocab_size, list_size
        self.scale = torch.ones(n, dtype=torch.float32, device=device)
        self.noise = torch.zeros(n, dtype=torch.float32, device=device)
        self.top_p = torch.ones(n, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(n, dtype=torch.float32, device=device)
        self.top_k = torch.full((n,), vocab_size, dtype=torch.int64, device=device)
        self.filtered = torch.zeros(n, dtype=torch.bool, device=device)
        self.seed_key = torch.zeros(n, dtype=torch.int64, device=device)
        self.suppress_until = torch.zeros(n, dtype=torch.int32, device=device)
        self.suppress_ids = torch.full((n, INITIAL_SUPPRESS_WIDTH), -1, dtype=torch.int32, device=device)
        self._host_noisy = np.zeros(n, dtype=bool)
        self._host_filtered = np.zeros(n, dtype=bool)
        self._host_wide = np.zeros(n, dtype=bool)
        self._host_wide_k = np.zeros(n, dtype=bool)
        self._host_until = np.zeros(n, dtype=np.int32)

    def apply(
        self, plan: StepPlan, sampling: torch.Tensor, suppress_runs: torch.Tensor, suppress_ids: torch.Tensor,
        extras: PlanExtras | None = None,
    ) -> None:  # fmt: skip
        """Take over the plan's sampling, suppress and optional sections; the tensors are the same on the device."""
        if len(plan.sampling):
            self._apply_host(plan.sampling)
            self._apply_device(sampling)
            self.extras.admit(plan.sampling[:, S.ROW], sampling[:, S.ROW].long())
        if len(plan.suppress_runs):
            self._host_until[plan.suppress_runs[:, 0]] = plan.suppress_runs[:, 1]
            self._apply_suppress(suppress_runs, suppress_ids, int(plan.suppress_runs[:, 2].max()))
        self.masks = None
        if extras is not None:
            self.extras.apply(plan.extras, extras)
            if len(extras.masks):
                self.masks = StepMasks(extras.mask_samples, extras.masks)

    def mode(self, rows: np.ndarray, positions: np.ndarray) -> SamplingMode:
        """The mode of the step applied last; it samples `rows` at absolute `positions` (int32 arrays on the host)."""
        filtered = self._host_filtered[rows]
        return SamplingMode(
            noisy=bool(self._host_noisy[rows].any()),
            num_filtered=int(np.count_nonzero(filtered)),
            wide=bool(self._host_wide[rows].any()),
            wide_k=bool(self._host_wide_k[rows].any()),
            suppress=bool((self._host_until[rows] > positions).any()),
            extras=self.extras.mode(rows),
            masked=self.masks is not None,
        )

    def _apply_host(self, entries: np.ndarray) -> None:
        rows = entries[:, S.ROW]
        temperature, top_p, min_p = (
            np.ascontiguousarray(entries[:, column]).view(np.float32) for column in (S.TEMPERATURE, S.TOP_P, S.MIN_P)
        )
        top_k = entries[:, S.TOP_K]
        has_k = (top_k > 0) & (top_k < self.vocab_size)
        noisy = temperature >= LOWEST_TEMPERATURE
        filtered = noisy & (has_k | (top_p < 1) | (min_p > 0))
        self._host_noisy[rows] = noisy
        self._host_filtered[rows] = filtered
        self._host_wide[rows] = filtered & ~(has_k & (top_k <= self.list_size))
        self._host_wide_k[rows] = filtered & has_k & (top_k > self.list_size)
        self._host_until[rows] = 0

    def _apply_device(self, entries: torch.Tensor) -> None:
        if entries.is_cuda:
            from worker.kernels.plan_sections import apply_sampling  # triton comes with torch for CUDA only

            apply_sampling(
                entries, self.scale, self.noise, self.top_p, self.min_p, self.top_k, self.filtered, self.seed_key,
                self.suppress_until, self.vocab_size, LOWEST_TEMPERATURE,
            )  # fmt: skip
            return
        rows = entries[:, S.ROW].long()
        temperature, top_p, min_p = (
            entries[:, column].contiguous().view(torch.float32) for column in (S.TEMPERATURE, S.TOP_P, S.MIN_P)
        )
        top_k = entries[:, S.TOP_K].long()
        has_k = (top_k > 0) & (top_k < self.vocab_size)
        noisy = temperature >= LOWEST_TEMPERATURE
        self.scale[rows] = torch.where(noisy, 1.0 / temperature, 1.0)
        self.noise[rows] = noisy.float()
        self.top_p[rows] = top_p
        self.min_p[rows] = min_p
        self.top_k[rows] = torch.where(has_k, top_k, self.vocab_size)
        self.filtered[rows] = noisy & (has_k | (top_p < 1) | (min_p > 0))
        self.seed_key[rows] = seed_keys(entries[:, S.SEED_LOW], entries[:, S.SEED_HIGH])
        self.suppress_until[rows] = 0

    def _apply_suppress(self, runs: torch.Tensor, ids: torch.Tensor, longest: int) -> None:
        width = self.suppress_ids.shape[1]
        if longest > width:
            more = max(longest, 2 * width) - width
            self.suppress_ids = torch.nn.functional.pad(self.suppress_ids, (0, more), value=-1)
        row, until, count = runs.long().unbind(1)
        self.suppress_until[row] = until.to(torch.int32)
        self.suppress_ids.index_fill_(0, row, -1)  # setting items to a number would wait for the device
        run = torch.repeat_interleave(torch.arange(len(runs), device=runs.device), count, output_size=len(ids))
        column = torch.arange(len(ids), device=runs.device) - (count.cumsum(0) - count)[run]
        self.suppress_ids[row[run], column] = ids
