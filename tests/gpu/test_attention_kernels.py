"""Paged attention kernels against plain torch in float32."""

import pytest
import torch

from tests.gpu.paged import DTYPES, SHAPES, Pool, close, reference

pytest.importorskip("triton", reason="triton is not installed")


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
