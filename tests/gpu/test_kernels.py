"""Each Triton kernel against a plain torch reference in float32."""

import numpy as np
import pytest
import torch

from tests.mixed_reference import hot_part
from tests.mixed_reference import mixed_inputs as mixed_inputs_reference
from worker.graphs.mixed import MixedInputs

pytest.importorskip("triton", reason="triton is not installed")

# The interpreter computes in numpy, which has no bfloat16.
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]
SHAPES = [  # num_q_heads, num_kv_heads, head_dim, page_size, page_first
    (4, 2, 64, 16, False),
    (8, 1, 128, 1, False),
    (3, 3, 80, 4, True),
    (16, 1, 96, 16, True),
    (2, 1, 256, 128, False),
]


class Pool:
    """A paged pool with scattered pages and rows of the given lengths, plus the dense K and V they stand for."""

    def __init__(self, lengths, kv_heads, dim, page_size, page_first, dtype, device, seed=0):
        gen = torch.Generator().manual_seed(seed)
        pages = [-(-n // page_size) for n in lengths]
        total = sum(pages) + 3
        shape = (2, 3, total, page_size, kv_heads, dim)
        if page_first:
            self.data = torch.randn(*(shape[i] for i in (2, 0, 1, 3, 4, 5)), generator=gen).permute(1, 2, 0, 3, 4, 5)
        else:
            self.data = torch.randn(*shape, generator=gen)
        self.data = self.data.to(dtype).to(device)
        if page_first and device.type == "cuda":
            assert not self.data.is_contiguous()
        self.k, self.v = self.data[0, 1], self.data[1, 1]
        order = torch.randperm(total, generator=gen).tolist()
        self.table = torch.zeros(len(lengths) + 2, max(pages) + 1, dtype=torch.int32)
        self.rows = torch.randperm(len(lengths) + 2, generator=gen)[: len(lengths)].to(torch.int32)
        for row, count in zip(self.rows.tolist(), pages, strict=True):
            self.table[row, :count] = torch.tensor([order.pop() * page_size for _ in range(count)])
        self.table, self.rows = self.table.to(device), self.rows.to(device)
        self.page_size, self.lengths = page_size, lengths

    def dense(self, entry):
        n = self.lengths[entry]
        position = torch.arange(n, device=self.table.device)
        page = self.table[int(self.rows[entry])][position // self.page_size].long() // self.page_size
        return (cache[page, position % self.page_size].float() for cache in (self.k, self.v))


def reference(q, k, v, cached):
    """Causal attention in float32: q [t, hq, d] at positions cached.., k and v [n, hkv, d]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    score = torch.einsum("thd,nhd->htn", q.float(), k) * q.shape[2] ** -0.5
    at = torch.arange(q.shape[0], device=q.device) + cached
    score.masked_fill_(torch.arange(k.shape[0], device=q.device)[None, None] > at[None, :, None], float("-inf"))
    return torch.einsum("htn,nhd->thd", score.softmax(-1), v)


def close(actual, expected, dtype):
    error = (actual.float() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2), float(error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_attention(shape, dtype, device, big):
    from worker.kernels.decode_attention import DecodeAttention

    q_heads, kv_heads, dim, page_size, page_first = shape
    lengths = [1, 17, 64, 65, 1000, 4097, 333] if big else [1, 65, 150]
    pool = Pool(lengths, kv_heads, dim, page_size, page_first, dtype, device)
    q = torch.randn(len(lengths), q_heads, dim).to(dtype).to(device)
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    for programs in (1, 64, 2048):  # one split, some, many
        kernel = DecodeAttention(q_heads, kv_heads, dim, page_size, len(lengths), device, num_programs=programs)
        for _ in range(2):  # the arrival counters must be back at zero
            out = torch.full_like(q, float("nan"))
            kernel(q, pool.k, pool.v, out, pool.table, pool.rows, lens)
            for i, n in enumerate(lengths):
                close(out[i : i + 1], reference(q[i : i + 1], *pool.dense(i), n - 1), dtype)
        assert not kernel.arrived.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_attention(shape, dtype, device, big):
    from worker.kernels.prefill_attention import prefill_attention
    from worker.kernels.tiled_prefill import TiledPrefill, tile_tokens

    q_heads, kv_heads, dim, page_size, page_first = shape
    extends, cached = ([1, 33, 700, 128, 5], [64, 0, 1333, 128, 3]) if big else ([1, 40], [64, 3])
    lengths = [a + b for a, b in zip(extends, cached, strict=True)]
    pool = Pool(lengths, kv_heads, dim, page_size, page_first, dtype, device)
    q = torch.randn(sum(extends), q_heads, dim).to(dtype).to(device)
    q = torch.cat((torch.full_like(q[:3], float("nan")), q))  # others' tokens come before
    cu = torch.tensor([3, *extends]).cumsum(0).to(torch.int32).to(device)
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in (cached, lengths)]
    tokens = tile_tokens(len(q), q_heads // kv_heads, dim, dtype)
    tiles = [(i, block) for i, n in enumerate(extends) for block in range(-(-n // tokens))]
    padded = [*tiles, *[(0, 0)] * 5]
    listed = torch.tensor(
        [len(tiles), *(i for i, _ in padded), *(block for _, block in padded)], dtype=torch.int32, device=device
    )
    tiled = TiledPrefill(q_heads, kv_heads, dim, dtype, device)
    for call in range(3):
        out = torch.full_like(q, float("nan"))
        arguments = (q, pool.k, pool.v, out, pool.table, pool.rows, *ints, cu)
        if call:  # twice: the arrival counters must be back at zero
            tiled(*arguments, listed)
        else:
            prefill_attention(*arguments, max(extends))
        assert out[:3].isnan().all()
        at = 3
        for i, n in enumerate(extends):
            close(out[at : at + n], reference(q[at : at + n], *pool.dense(i), cached[i]), dtype)
            at += n
    assert not tiled.arrived.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("extend", "cached"), [(1, 0), (3, 700), (20, 300), (70, 640), (33, 5000)])
def test_few_tiles_are_split(extend, cached, dtype, device, big):
    """Runs of keys that some tokens of a tile see nothing of, and runs on either side of the diagonal."""
    from worker.kernels.tiled_prefill import TiledPrefill, tile_tokens

    if not big and cached > 700:
        pytest.skip("too large for the interpreter")
    pool = Pool([extend + cached], 2, 64, 16, False, dtype, device)
    q = torch.randn(extend + 9, 4, 64).to(dtype).to(device)
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([cached], [extend + cached], [0])]
    blocks = list(range(-(-extend // tile_tokens(len(q), 2, 64, dtype))))
    listed = torch.tensor([len(blocks), *blocks, *blocks], dtype=torch.int32, device=device)
    listed[1 : 1 + len(blocks)] = 0
    out = torch.full_like(q, float("nan"))
    tiled = TiledPrefill(4, 2, 64, dtype, device)
    for _ in range(2):
        tiled(q, pool.k, pool.v, out, pool.table, pool.rows, *ints, listed)
        close(out[:extend], reference(q[:extend], *pool.dense(0), cached), dtype)
    assert out[extend:].isnan().all() and not tiled.arrived.any()


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


@pytest.mark.parametrize("page_first", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_flash_prefill(page_size, page_first, device):
    from worker.kernels.flash_prefill import FlashPrefill, why_not

    if (reason := why_not(torch.bfloat16, device)) is not None:
        pytest.skip(reason)
    extends, cached = [33, 700, 128, 5, 1], [0, 1333, 128, 3, 64]
    lengths = [a + b for a, b in zip(extends, cached, strict=True)]
    pool = Pool(lengths, 2, 128, page_size, page_first, torch.bfloat16, device)
    q = torch.randn(sum(extends), 8, 128, dtype=torch.bfloat16, device=device)
    for i, n in enumerate(lengths):  # what a request left behind that had gone wrong
        last = pool.table[int(pool.rows[i]), (n - 1) // page_size] // page_size
        pool.v[last, (n - 1) % page_size + 1 :] = torch.nan
    flash = FlashPrefill()
    flash.start()
    flash.compile(8, pool.k, pool.v)
    flash.wait()
    assert flash.ready, flash.error
    cu = torch.tensor([0, *extends]).cumsum(0).to(torch.int32).to(device)
    pages = pool.table[pool.rows.long()] // page_size
    lens = torch.tensor([0, *lengths], dtype=torch.int32, device=device)[1:]  # a slice that begins anywhere
    out = flash(q, pool.k, pool.v, pages, cu, lens, max(extends), max(lengths))
    at = 0
    for i, n in enumerate(extends):
        close(out[at : at + n], reference(q[at : at + n], *pool.dense(i), cached[i]), torch.bfloat16)
        at += n


@pytest.mark.parametrize("page_first", [False, True])
@pytest.mark.parametrize(("page_size", "dim"), [(64, 80), (128, 128)])
def test_clear_tails(page_size, dim, page_first, device):
    from worker.kernels.clear_tails import clear_tails

    lengths = [1, page_size, page_size + 1, 3 * page_size - 1]
    pool = Pool(lengths, 2, dim, page_size, page_first, DTYPES[1], device)
    expected = pool.v.clone()
    for i, n in enumerate(lengths):
        last = pool.table[int(pool.rows[i]), (n - 1) // page_size] // page_size
        expected[last, (n - 1) % page_size + 1 :] = 0
    pages = pool.table[pool.rows.long()] // page_size
    clear_tails(pool.v, pages, torch.tensor(lengths, dtype=torch.int32, device=device))
    assert torch.equal(pool.v, expected)


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
