"""Steps to run before the first request, as plans that touch nothing but the dummy page."""

from __future__ import annotations

import numpy as np

from scheduler.step import SAMPLING_WORDS, StepPlan, StepPlanWriter, pack_sampling


def largest_step(max_running_requests: int, max_seq_len: int, max_step_tokens: int, dummy_slot: int) -> StepPlan:
    """`max_step_tokens` tokens over as many rows as fit, half of them decodes at full length, sampled with top-p."""
    rows = min(max_running_requests, max_step_tokens)
    decodes = rows // 2
    extend = np.ones(rows, dtype=np.int32)
    spare = max_step_tokens - rows
    for row in range(decodes, rows):  # the first prefills are as long as they can be
        extend[row] += min(spare, max_seq_len - 1)
        spare -= extend[row] - 1
    return dummy_step(extend, decodes, max_seq_len - 1, dummy_slot, top_p=0.9)


def small_steps(max_running_requests: int, max_step_tokens: int, max_seq_len: int, dummy_slot: int) -> list[StepPlan]:
    """Steps that between them meet every variant of the kernels: few and many rows, short and long prefills."""
    most = min(max_step_tokens, max_seq_len)
    lengths = sorted({min(length, most) for length in (1, 2, 4, 8, 12, 24, 48, 100, 300, 600)})
    steps = [dummy_step(np.array([n], dtype=np.int32), 0, 0, dummy_slot, temperature=float(n % 2)) for n in lengths]
    if max_running_requests > 1 and max_step_tokens > 1:
        steps.append(dummy_step(np.array([1, min(40, most - 1)], dtype=np.int32), 1, 1, dummy_slot))
    return steps


def dummy_step(
    extend: np.ndarray, decodes: int, decode_cached: int, dummy_slot: int, temperature: float = 1.0, top_p: float = 1.0
) -> StepPlan:
    """A plan of rows 0, 1, ... with `extend` (int32) new tokens each, the first `decodes` of them decodes.

    On a fresh page table every row's pages are the dummy page, so its K/V go nowhere else; the one page that the plan
    assigns is it, too. The rows' sampling parameters and tokens are left behind; a row gets new ones when a request is
    admitted to it.
    """
    rows, tokens = len(extend), int(extend.sum())
    plan = StepPlanWriter(ring=1).begin(
        step_id=0, num_rows=rows, num_decode=decodes, num_samples=rows, num_tokens=tokens, sampling=rows,
        page_deltas=1, token_runs=rows - decodes, run_tokens=tokens - decodes,
    )  # fmt: skip
    plan.page_deltas[:] = 0, 0, dummy_slot
    for run, row in zip(plan.token_runs, range(decodes, rows), strict=True):
        run[:] = row, 0, extend[row]
    plan.run_tokens[:] = 0
    plan.rows[:] = plan.sample[:] = np.arange(rows)
    plan.cached_len[:decodes] = decode_cached
    plan.cached_len[decodes:] = 0
    plan.device_len[:] = plan.cached_len + extend
    plan.out_loc[:] = dummy_slot
    entries = plan.sampling.reshape(rows, SAMPLING_WORDS)
    for row in range(rows):
        pack_sampling(
            entries[row], row=row, temperature=temperature, top_p=top_p, min_p=0.0, top_k=0, seed=row, prompt_len=1
        )
    return plan.seal()
