"""Kernels between attention and the plan, each against plain torch in float32: element-wise, products, sampling."""

import pytest
import torch

from tests.gpu.paged import DTYPES, SHAPES, Pool, close

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 576, 1024, 4096])
def test_add_rms_norm(width, dtype, device):
    from worker.kernels.elementwise import add_rms_norm

    x, residual = torch.randn(5, width).to(dtype).to(device), torch.randn(5, width).to(dtype).to(device)
    weight = torch.randn(width).to(dtype).to(device)

    def norm(t):
        return (t.float() * torch.rsqrt(t.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype) * weight

    close(add_rms_norm(x, None, weight, 1e-5), norm(x).float(), dtype)
    total = (x.float() + residual.float()).to(dtype)
    close(add_rms_norm(x, residual, weight, 1e-5), norm(total).float(), dtype)
    assert torch.equal(residual, total)


@pytest.mark.parametrize("width", [24, 1536, 3072])
def test_silu_mul(width, device):
    from worker.kernels.elementwise import silu_mul

    x = torch.randn(7, 2 * width, device=device)
    close(silu_mul(x), torch.nn.functional.silu(x[:, :width]) * x[:, width:], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_store(shape, with_norm, dtype, device):
    from worker.kernels.elementwise import rope_store

    q_heads, kv_heads, dim, page_size, page_first = shape
    tokens, half = 5, dim // 2
    pool = Pool([40], kv_heads, dim, page_size, page_first, dtype, device)
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim).to(dtype).to(device)
    positions = torch.tensor([3, 0, 17, 5, 6], device=device)
    slots = torch.randperm(40)[:tokens].to(device)
    angle = torch.rand(32, half, device=device) * 6
    norms = [torch.randn(dim).to(dtype).to(device) if with_norm else None for _ in range(2)]
    q = rope_store(qkv, positions, angle.cos(), angle.sin(), pool.k, pool.v, slots, q_heads, *norms, eps=1e-6)
    heads = qkv.view(tokens, -1, dim)
    parts = heads.split([q_heads, kv_heads, kv_heads], 1)

    def rotate(t, weight):
        t = t.float()
        if weight is not None:
            t = ((t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype) * weight).float()
        cos, sin = angle[positions].cos()[:, None], angle[positions].sin()[:, None]
        low, high = t[..., :half], t[..., half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    close(q, rotate(parts[0], norms[0]), dtype)
    page, offset = slots // page_size, slots % page_size
    close(pool.k[page, offset], rotate(parts[1], norms[1]), dtype)
    assert torch.equal(pool.v[page, offset], parts[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_gemv(rows, with_bias, dtype, device):
    from worker.kernels.gemv import gemv

    for size_n, size_k in ((64, 64), (100, 576), (515, 1536)):
        x, weight = torch.randn(rows, size_k).to(dtype).to(device), torch.randn(size_n, size_k).to(dtype).to(device)
        bias = torch.randn(size_n).to(dtype).to(device) if with_bias else None
        expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
        close(gemv(x, weight, bias), expected.float(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_gated_gemv(rows, dtype, device):
    from worker.kernels.gemv import gemv

    for size_n, size_k in ((70, 576), (35, 2600)):
        x, weight = torch.randn(rows, size_k).to(dtype).to(device), torch.randn(2 * size_n, size_k).to(dtype).to(device)
        bias = torch.randn(2 * size_n).to(dtype).to(device)
        gate, up = (x.double() @ weight.double().T + bias.double()).to(dtype).float().chunk(2, 1)
        close(gemv(x, weight, bias, gated=True), torch.nn.functional.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [5, 17, 64, 128])
def test_gated_gemm(rows, with_bias, dtype, device, big):
    from worker.kernels.gated_gemm import gated_gemm

    for size_n, size_k in ((1000, 1024), (515, 576)) if big else ((70, 96),):
        x = torch.randn(rows, size_k).to(dtype).to(device)
        weight = torch.randn(2 * size_n, size_k).to(dtype).to(device)
        bias = torch.randn(2 * size_n).to(dtype).to(device) if with_bias else None
        product = (x.double() @ weight.double().T + (bias.double() if with_bias else 0)).float()
        gate, up = product.chunk(2, 1)
        close(gated_gemm(x, weight, bias), torch.nn.functional.silu(gate) * up, dtype)


@pytest.mark.parametrize("vocab", [17, 1500, 20003])
def test_sample_shard(vocab, device):
    from worker.kernels.sample import sample_shard
    from worker.sampling.noise import gumbel, row_keys, seed_keys

    logits = torch.randn(4, vocab, device=device) * 3
    logits[0, 5] = logits[0, 11] = 50.0  # a tie: the lower id wins
    rows, positions = torch.tensor([3, 0, 2, 1], device=device), torch.tensor([5, 6, 100, 7], device=device)
    words = torch.tensor([1, -7, 3, 2**31 - 1], dtype=torch.int32, device=device)
    seed_key = seed_keys(words, words + 1)
    scale = torch.tensor([1.25, 1.0, 2.0, 0.5], device=device)
    noise = torch.tensor([1.0, 1.0, 0.0, 1.0], device=device)

    best, tokens = sample_shard(logits, 1000, rows, positions, scale, noise, seed_key, noisy=False)
    assert torch.equal(tokens.long(), logits.argmax(1) + 1000)
    assert int(tokens[0]) == 1005
    assert torch.equal(best, logits.amax(1))

    k0, k1 = row_keys(seed_key[rows], positions)
    ids = torch.arange(1000, 1000 + vocab, dtype=torch.int32, device=device)
    scores = gumbel(k0[:, None], k1[:, None], ids) + logits * scale[rows, None]
    scores[2] = logits[2]  # greedy
    best, tokens = sample_shard(logits, 1000, rows, positions, scale, noise, seed_key, noisy=True)
    assert torch.allclose(best, scores.amax(1), atol=1e-5)
    assert torch.equal(tokens.long(), scores.argmax(1) + 1000)

    logits[0, vocab - 1], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    for noisy in (False, True):
        best, tokens = sample_shard(logits, 1000, rows, positions, scale, noise, seed_key, noisy=noisy)
        assert tokens[:3].tolist() == [-1] * 3 and tokens[3] >= 1000
        assert best[:3].tolist() == [torch.inf, torch.inf, -torch.inf]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_best_shard(ranks, device):
    from worker.kernels.sample import best_shard
    from worker.sampling import shard

    scores = torch.randint(0, 3, (ranks, 50)).float()  # with many ties
    scores[0, 1] = scores[-1, 2] = torch.inf
    scores[:, 3] = -torch.inf
    tokens = torch.where(scores.isfinite(), torch.arange(ranks)[:, None] * 1000 + 7, shard.UNUSABLE).int()
    shards = torch.stack((scores.view(torch.int32), tokens), 1)
    best = best_shard(shards.to(device)).cpu()
    assert torch.equal(best, shard.best_shard(shards))
    assert best[1:4].tolist() == [shard.UNUSABLE] * 3
    assert torch.equal(best[4:].long(), scores[:, 4:].argmax(0) * 1000 + 7)
