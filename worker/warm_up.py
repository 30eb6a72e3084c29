"""The largest step a rank can be asked to run, as a plan that touches nothing but the dummy page."""

from __future__ import annotations

import numpy as np

from scheduler.step import SAMPLING_WORDS, StepPlan, StepPlanWriter, pack_sampling


def largest_step(max_running_requests: int, max_seq_len: int, max_step_tokens: int, dummy_slot: int) -> StepPlan:
    """`max_step_tokens` tokens over as many rows as fit, half of them decodes at full length, all sampled with top-p.

    On a fresh page table every row's pages are the dummy page, so its K/V go nowhere else. The rows' sampling
    parameters and tokens are left behind; a row gets new ones when a request is admitted to it.
    """
    rows = min(max_running_requests, max_step_tokens)
    decodes = rows // 2
    extend = np.ones(rows, dtype=np.int32)
    spare = max_step_tokens - rows
    for row in range(decodes, rows):  # the first prefills are as long as they can be
        extend[row] += min(spare, max_seq_len - 1)
        spare -= extend[row] - 1
    tokens = int(extend.sum())
    plan = StepPlanWriter(ring=1).begin(
        step_id=0, num_rows=rows, num_decode=decodes, num_samples=rows, num_tokens=tokens, sampling=rows
    )
    plan.rows[:] = plan.sample[:] = np.arange(rows)
    plan.cached_len[:decodes] = max_seq_len - 1
    plan.cached_len[decodes:] = 0
    plan.device_len[:] = plan.cached_len + extend
    plan.out_loc[:] = dummy_slot
    entries = plan.sampling.reshape(rows, SAMPLING_WORDS)
    for row in range(rows):
        pack_sampling(entries[row], row=row, temperature=1.0, top_p=0.9, min_p=0.0, top_k=0, seed=row, prompt_len=1)
    return plan.seal()
