"""Masks on a sharded vocabulary against plain numpy, at several TP sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from thread_group import ThreadGroup, run_ranks

from scheduler.step import ExtraCounts, StepPlan, StepPlanWriter, pack_sampling
from tests.unit.test_sampler_extras import apply
from worker.parallel import TPGroup
from worker.sampling import Sampler
from worker.sampling.noise import gumbel, row_keys, seed_keys

torch.set_num_threads(1)
VOCAB, KNOWN = 192, 150  # ids of the model, and of its tokenizer: masks end with the word that holds the last of those
ROWS = {4: {}, 1: {"temperature": 0.8, "seed": 5}, 2: {"temperature": 1.3, "seed": 6, "top_k": 3}, 0: {}, 3: {}}


def make_plan(allowed: dict[int, list[int]]) -> StepPlan:
    """Admits `ROWS`; `allowed` has the ids of sampled entries with a mask."""
    words = -(-KNOWN // 32)
    counts = ExtraCounts(masks=len(allowed), mask_words=words * len(allowed))
    plan = StepPlanWriter(1).begin(
        step_id=1, num_rows=0, num_decode=0, num_samples=0, num_tokens=0, sampling=len(ROWS),
        extras=counts if allowed else None,
    )  # fmt: skip
    base = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": 1, "prompt_len": 1}
    for entry, (row, given) in zip(plan.sampling, ROWS.items(), strict=True):
        pack_sampling(entry, row=row, **(base | given))
    for number, (sample, ids) in enumerate(allowed.items()):
        bits = np.zeros(32 * words, dtype=np.uint8)
        bits[ids] = 1
        plan.extras.mask_samples[number] = sample
        plan.extras.masks[number] = np.packbits(bits, bitorder="little").view(np.int32)
    return plan.seal()


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_masked_tokens_are_the_best_of_those_allowed(tp_size: int) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 2, (len(ROWS), VOCAB)).astype(np.float32)
    allowed = {0: [31, 32, 63], 1: [149], 2: rng.choice(KNOWN, 40, replace=False).tolist(), 3: [0, 95, 96, 100, 127]}
    positions = np.full(len(ROWS), 9)

    def work(tp: ThreadGroup) -> list[list[int]]:
        group = TPGroup.single() if tp.size == 1 else tp
        share = slice(VOCAB // tp.size * tp.rank, VOCAB // tp.size * (tp.rank + 1))
        sampler = Sampler(len(ROWS), VOCAB, share.start, group, torch.device("cpu"))
        tokens = []
        for masks in (allowed, {}):
            apply(sampler, make_plan(masks))
            rows = np.array(list(ROWS))
            mode = sampler.state.mode(rows, positions)
            assert mode.masked == bool(masks) and not mode.is_plain
            local = torch.from_numpy(logits[:, share].copy())
            tokens.append(sampler.sample(local, torch.tensor(rows), torch.tensor(positions), mode).tolist())
        return tokens

    results = run_ranks(tp_size, work)
    assert all(result == results[0] for result in results)
    masked, plain = results[0]
    for entry, given in enumerate(ROWS.values()):
        for tokens, ids in ((masked, allowed.get(entry)), (plain, None)):
            scores = np.full(VOCAB, -np.inf)
            ids = np.arange(VOCAB) if ids is None else np.array(ids)
            scores[ids] = logits[entry, ids]
            if "top_k" in given:
                scores[scores < np.sort(scores)[-given["top_k"]]] = -np.inf
            if given:
                key = row_keys(
                    seed_keys(torch.tensor([given["seed"]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)),
                    torch.tensor([9]),
                )
                noise = gumbel(*key, torch.arange(VOCAB, dtype=torch.int32)).numpy()
                scores = scores / given["temperature"] + noise
            assert tokens[entry] == scores.argmax(), entry
