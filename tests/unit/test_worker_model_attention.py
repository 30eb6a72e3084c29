"""The torch attention backend against a plain formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcache.pool import KVCacheLayout, MHAKVCache
from tests.unit.worker_model_harness import make_batch
from worker.attention import create_attention_backend, torch_backend
from worker.errors import ModelError
from worker.page_table import PageTable

HEAD_DIM, ROWS, MAX_LEN = 16, 6, 40


def reference(q, k, v, first):
    """q [n, heads, d] at positions first .. first + n - 1 over k, v [length, kv_heads, d]."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * q.shape[-1] ** -0.5
    future = torch.arange(k.shape[0]) > first + torch.arange(q.shape[0])[:, None]
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


def run(page_size, layout, heads, kv_heads, cached, inputs, dtype=torch.float32):
    """Largest error of one step over random K/V; `inputs`: row -> number of new tokens, in batch order."""
    generator = torch.Generator().manual_seed(0)
    pages = -(-MAX_LEN // page_size)
    pool = MHAKVCache(2, ROWS * pages + 1, page_size, kv_heads, HEAD_DIM, dtype, "cpu", layout)
    pool.kv_buffer.normal_(generator=generator)
    table = PageTable(ROWS, MAX_LEN, page_size, ROWS * pages, "cpu")
    table.page_starts[:ROWS] = (torch.randperm(ROWS * pages, generator=generator).view(ROWS, pages) * page_size).int()
    cached = np.array(cached, dtype=np.int32)
    rows = list(inputs)
    num_decode = 0
    while num_decode < len(rows) and inputs[rows[num_decode]] == 1:
        num_decode += 1
    batch = make_batch(table, rows, cached, {row: [0] * n for row, n in inputs.items()}, num_decode)
    q = torch.randn(sum(inputs.values()), heads, HEAD_DIM, generator=generator).to(dtype)
    backend = create_attention_backend("torch", "cpu")
    backend.attach(pool, table)
    backend.prepare(batch)
    out = backend.forward(q, 1, batch)
    assert out.is_contiguous() and out.shape == q.shape and out.dtype == dtype
    worst, start = 0.0, 0
    for row, n in inputs.items():
        length = cached[row] + n
        slots = table.slots(torch.tensor(row), torch.arange(length))
        k, v = (cache[slots // page_size, slots % page_size] for cache in (pool.k_cache(1), pool.v_cache(1)))
        expected = reference(q[start : start + n], k, v, int(cached[row]))
        worst = max(worst, (out[start : start + n].double() - expected).abs().max().item())
        start += n
    return worst


MIXED = {3: 1, 0: 1, 5: 1, 1: 7, 4: 1, 2: 12}
CACHED = [30, 0, 9, 0, 25, 39]


@pytest.mark.parametrize("gather_bytes", [torch_backend.GATHER_BYTES, 4096, 1])
@pytest.mark.parametrize("layout", KVCacheLayout)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_mixed_batch(monkeypatch, page_size, layout, gather_bytes):
    """Decodes in one group, in several, and one by one, beside prefills with and without a cached prefix."""
    monkeypatch.setattr(torch_backend, "GATHER_BYTES", gather_bytes)
    assert run(page_size, layout, 6, 2, CACHED, MIXED) < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1)])
def test_head_counts(heads, kv_heads):
    assert run(4, KVCacheLayout.LAYER_FIRST, heads, kv_heads, CACHED, MIXED) < 1e-5


def test_only_decodes_and_only_prefills():
    assert run(4, KVCacheLayout.LAYER_FIRST, 6, 2, CACHED, {0: 1, 2: 1}) < 1e-5
    assert run(4, KVCacheLayout.LAYER_FIRST, 6, 2, CACHED, {1: 3, 2: 5}) < 1e-5


def test_bfloat16():
    assert run(4, KVCacheLayout.LAYER_FIRST, 6, 2, CACHED, MIXED, dtype=torch.bfloat16) < 0.05


def test_unknown_backend():
    with pytest.raises(ModelError, match=r"'nonsense' is unknown: known are auto, .*torch"):
        create_attention_backend("nonsense", "cpu")
