"""Kernels between a plan and the model: inputs of captured steps, the token pool, what a plan changes."""

import numpy as np
import pytest
import torch

from tests.mixed_reference import hot_part
from tests.mixed_reference import mixed_inputs as mixed_inputs_reference
from worker.graphs.mixed import MixedInputs

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize(("size_t", "size_s"), [(64, 8), (2048, 256), (40, 33)])
def test_mixed_inputs(size_t, size_s, device):
    """Of random plans, from full to empty, chunked prefills among them; the buffer holds what earlier plans left."""
    from scheduler.step import StepPlanWriter
    from worker.kernels.mixed_inputs import mixed_inputs

    rng = np.random.default_rng(size_t)
    table_rows, width = size_s + 5, 3000
    pool = torch.randint(0, 32000, (table_rows + 1, width), dtype=torch.int32, device=device)
    for number in range(12):
        rows = int(rng.integers(1, size_s + 1)) if number else size_s
        decodes = int(rng.integers(max(0, rows - 20), rows + 1))
        extend = np.ones(rows, dtype=np.int32)
        for _ in range(int(rng.integers(0, 5)) if decodes < rows else 0):
            extend[rng.integers(decodes, rows)] += rng.integers(0, (size_t - extend.sum()) // 2 + 1)
        if not number and decodes < rows:
            extend[-1] += size_t - extend.sum()
        samples = np.sort(rng.permutation(rows)[: rng.integers(0, rows + 1)])
        plan = StepPlanWriter(1).begin(
            step_id=1, num_rows=rows, num_decode=decodes, num_samples=len(samples), num_tokens=int(extend.sum()),
            padded_rows=rows + number % 2, padded_tokens=int(extend.sum()) + number % 2,
        )  # fmt: skip
        plan.buffer[32:] = 7
        plan.rows[:rows] = rng.permutation(table_rows)[:rows]
        plan.cached_len[:rows] = rng.integers(0, width - size_t, rows)
        plan.device_len[:rows] = plan.cached_len[:rows] + extend
        plan.sample[: len(samples)] = samples
        plan.out_loc[:] = rng.integers(0, 10**6, len(plan.out_loc))
        buffer = hot_part(plan.seal(), 32 + 4 * (size_s + 1) + size_t + 1).to(device)
        arguments = (buffer, pool, size_t, size_s, 20, 5, table_rows, 123)
        for name, ours, expected in zip(
            MixedInputs._fields, mixed_inputs(*arguments), mixed_inputs_reference(*arguments), strict=True
        ):
            used = slice(size_s, 2 * size_s) if name == "cu_extend" else slice(None)
            assert ours.dtype == expected.dtype and torch.equal(ours[used], expected[used]), name


def test_decode_inputs_and_scatter(device):
    from worker.kernels.token_pool import decode_inputs, scatter_tokens

    pool = torch.arange(7 * 30, dtype=torch.int32, device=device).view(7, 30)
    rows = torch.randint(0, 7, (200,), dtype=torch.int32, device=device)
    cached = torch.randint(0, 29, (200,), dtype=torch.int32, device=device)
    slots = torch.randint(0, 2**31 - 1, (200,), dtype=torch.int32, device=device)
    for count in (1, 3, 200):
        ids, positions, out_loc = decode_inputs(pool, rows[:count], cached[:count], slots[:count])
        assert ids.dtype == positions.dtype == out_loc.dtype == torch.int64
        assert torch.equal(ids, pool[rows[:count].long(), cached[:count].long()].long())
        assert torch.equal(positions, cached[:count].long()) and torch.equal(out_loc, slots[:count].long())
    expected = pool.clone()
    rows, positions = torch.tensor([2, 6, 0], device=device), torch.tensor([29, 0, 7], device=device)
    new = torch.tensor([5, -1, 9], dtype=torch.int32, device=device)
    scatter_tokens(pool, rows, positions, new)
    expected[rows, positions] = torch.tensor([5, 0, 9], dtype=torch.int32, device=device)
    assert torch.equal(pool, expected)


def test_plan_sections(device):
    """The kernels leave what the torch versions leave, also from slices that begin anywhere."""
    from scheduler.step import SAMPLING_WORDS, pack_sampling
    from worker.kernels.plan_sections import apply_page_deltas, apply_sampling, write_token_runs
    from worker.page_table import PageTable
    from worker.sampling.extras import RowExtras
    from worker.sampling.state import LOWEST_TEMPERATURE, SamplingState
    from worker.token_pool import TokenPool

    rng = np.random.default_rng(1)

    def slice_of(words):
        """On the device, at an address that is a multiple of 4 only."""
        flat = np.concatenate(([0], words.ravel())).astype(np.int32)
        return torch.from_numpy(flat).to(device)[1:].view(words.shape)

    rows, page = 300, 4
    table = PageTable(rows, 64, page, 50, "cpu")
    starts = table.page_starts.to(device, copy=True)
    for count in (1, 16, 200):
        places = rng.permutation(rows * 16)[:count]
        deltas = np.stack((places // 16, places % 16 * page, rng.integers(0, 50, count) * page), 1)
        table.apply(slice_of(deltas).cpu())
        apply_page_deltas(slice_of(deltas), starts, page)
    assert torch.equal(starts.cpu(), table.page_starts)

    pool = TokenPool(rows, 1500, page, "cpu")
    tokens = pool.tokens.to(device, copy=True)
    for counts in ([1], [7, 1400, 3], [5] * 290):
        first = [int(rng.integers(0, 1500 - n)) for n in counts]
        runs = np.stack((rng.permutation(rows)[: len(counts)], first, counts), 1)
        ids = rng.integers(0, 9999, sum(counts))
        pool.write_runs(slice_of(runs).cpu(), slice_of(ids).cpu())
        write_token_runs(slice_of(runs), slice_of(ids), tokens)
    assert torch.equal(tokens.cpu(), pool.tokens)

    entries = np.zeros((40, SAMPLING_WORDS), dtype=np.int32)
    for row, entry in zip(rng.permutation(rows), entries, strict=False):
        pack_sampling(
            entry, row=row, temperature=float(rng.choice([0.0, 1e-6, 0.3, 1.7])), top_p=float(rng.choice([1.0, 0.9])),
            min_p=float(rng.choice([0.0, 0.1])), top_k=int(rng.choice([0, 5, 999, 1000, 5000])),
            seed=int(rng.integers(0, 2**63)) * 2 + 1, prompt_len=3,
        )  # fmt: skip
    names = ("scale", "noise", "top_p", "min_p", "top_k", "filtered", "seed_key", "suppress_until")
    state = SamplingState(rows, 1000, 64, torch.device("cpu"), RowExtras(rows, 0, 1000, torch.device("cpu")))
    state.suppress_until += 9
    ours = [getattr(state, name).to(device, copy=True) for name in names]
    state._apply_device(torch.from_numpy(entries))
    apply_sampling(slice_of(entries), *ours, 1000, LOWEST_TEMPERATURE)
    for name, tensor in zip(names, ours, strict=True):
        assert torch.equal(tensor.cpu(), getattr(state, name)), name
