"""The inputs of a captured step with prefills, made from its plan on the device in one kernel.

Every program looks at all entries: there are at most a few hundred, and sums over them say where each begins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from scheduler.step import HEADER_WORDS, H

_BLOCK = 32


@triton.jit
def _mixed_inputs_kernel(
    plan_ptr, pool_ptr, pool_stride, input_ptr, entry_ptr, cu_ptr, target_ptr, tile_ptr, dummy_row, dummy_slot,
    size_t, size_s, num_tiles,
    TILE: tl.constexpr, S_PAD: tl.constexpr, BLOCK: tl.constexpr, HEADER: tl.constexpr, NUM_ROWS: tl.constexpr,
    PADDED_ROWS: tl.constexpr, NUM_DECODE: tl.constexpr, NUM_SAMPLES: tl.constexpr, NUM_TOKENS: tl.constexpr,
):  # fmt: skip
    num_rows = tl.load(plan_ptr + NUM_ROWS)
    num_decode = tl.load(plan_ptr + NUM_DECODE)
    padded = tl.load(plan_ptr + PADDED_ROWS)
    rows_ptr = plan_ptr + HEADER
    cached_ptr = rows_ptr + padded
    length_ptr = cached_ptr + padded
    sample_ptr = length_ptr + padded
    loc_ptr = sample_ptr + padded

    entry = tl.arange(0, S_PAD)
    live = entry < num_rows
    length = tl.load(length_ptr + entry, mask=live, other=0)
    extend = length - tl.load(cached_ptr + entry, mask=live, other=0)
    end = tl.cumsum(extend, 0)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    # Token `at` is of the entry before which as many entries have ended.
    live = at < tl.load(plan_ptr + NUM_TOKENS)
    ended = end[None, :] <= at[:, None]
    own = tl.sum(ended.to(tl.int32), 1)
    start = tl.sum(tl.where(ended, extend[None, :], 0), 1)
    row = tl.load(rows_ptr + own, mask=live, other=0).to(tl.int64)
    position = tl.where(live, tl.load(cached_ptr + own, mask=live, other=0) + at - start, 0)
    token = tl.load(pool_ptr + row * pool_stride + position, mask=live, other=0)
    slot = tl.load(loc_ptr + at, mask=live, other=0)
    slot = tl.where(live, slot, dummy_slot)
    inside = at < size_t
    tl.store(input_ptr + at, token.to(tl.int64), mask=inside)
    tl.store(input_ptr + size_t + at, position.to(tl.int64), mask=inside)
    tl.store(input_ptr + 2 * size_t + at, slot.to(tl.int64), mask=inside)

    # Entry `at`, as a decode and as a prefill.
    live = at < num_rows
    row = tl.where(live, tl.load(rows_ptr + at, mask=live, other=0), dummy_row)
    cached = tl.load(cached_ptr + at, mask=live, other=0)
    length = tl.load(length_ptr + at, mask=live, other=0)
    start = tl.sum(tl.where(entry[None, :] < at[:, None], extend[None, :], 0), 1)
    inside = at < size_s
    tl.store(entry_ptr + at, row, mask=inside)
    tl.store(entry_ptr + size_s + at, row, mask=inside)
    tl.store(entry_ptr + 2 * size_s + at, cached, mask=inside)
    tl.store(entry_ptr + 3 * size_s + at, cached, mask=inside)
    tl.store(entry_ptr + 4 * size_s + at, tl.where(at < num_decode, length, 0), mask=inside)
    tl.store(entry_ptr + 5 * size_s + at, length, mask=inside)
    tl.store(cu_ptr + size_s + at, start, mask=inside)

    # Sample `at`: the last token of its entry.
    live = at < tl.load(plan_ptr + NUM_SAMPLES)
    sampled = tl.load(sample_ptr + at, mask=live, other=0)
    last = tl.sum(tl.where(entry[None, :] <= sampled[:, None], extend[None, :], 0), 1) - 1
    row = tl.where(live, tl.load(rows_ptr + sampled, mask=live, other=0), dummy_row)
    position = tl.load(length_ptr + sampled, mask=live, other=0)
    tl.store(target_ptr + at, tl.where(live, last, 0).to(tl.int64), mask=inside)
    tl.store(target_ptr + size_s + at, row.to(tl.int64), mask=inside)
    tl.store(target_ptr + 2 * size_s + at, position.to(tl.int64), mask=inside)

    # Tile `at`: the prefills' tokens in runs of TILE, those of an entry with most keys first.
    runs = tl.where(entry >= num_decode, (extend + TILE - 1) // TILE, 0)
    total = tl.sum(runs, 0)
    live = at < total
    ended = tl.cumsum(runs, 0)[None, :] <= at[:, None]
    own = tl.sum(ended.to(tl.int32), 1)
    first = tl.sum(tl.where(ended, runs[None, :], 0), 1)
    count = tl.sum(tl.where(entry[None, :] == own[:, None], runs[None, :], 0), 1)
    inside = at < num_tiles
    tl.store(tile_ptr + at * 0, total, mask=at == 0)
    tl.store(tile_ptr + 1 + at, tl.where(live, own, 0), mask=inside)
    tl.store(tile_ptr + 1 + num_tiles + at, tl.where(live, count - 1 - (at - first), 0), mask=inside)


def mixed_inputs(
    plan: torch.Tensor, pool: torch.Tensor, size_t: int, size_s: int, prefills: int, tile: int, dummy_row: int,
    dummy_slot: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The fields of `worker.graphs.mixed.MixedInputs`, in order, for `size_t` tokens and `size_s` entries.

    plan: int32, the hot part of a plan of at most so many, `prefills` of them no decodes. pool: the token pool,
    int32[rows, width]. tile: tokens of a tile, as the prefill kernel takes them.
    """
    device = plan.device
    num_tiles = triton.cdiv(size_t, tile) + prefills
    inputs = torch.empty(3, size_t, dtype=torch.int64, device=device)
    entries = torch.empty(3, 2 * size_s, dtype=torch.int32, device=device)
    cu_extend = torch.empty(2 * size_s + 1, dtype=torch.int32, device=device)
    targets = torch.empty(3, size_s, dtype=torch.int64, device=device)
    tiles = torch.empty(1 + 2 * num_tiles, dtype=torch.int32, device=device)
    _mixed_inputs_kernel[(triton.cdiv(max(size_t, size_s, num_tiles), _BLOCK),)](
        plan, pool, pool.stride(0), inputs, entries, cu_extend, targets, tiles, dummy_row, dummy_slot,
        size_t, size_s, num_tiles,
        TILE=tile, S_PAD=triton.next_power_of_2(size_s), BLOCK=_BLOCK, HEADER=HEADER_WORDS, NUM_ROWS=int(H.NUM_ROWS),
        PADDED_ROWS=int(H.PADDED_ROWS), NUM_DECODE=int(H.NUM_DECODE), NUM_SAMPLES=int(H.NUM_SAMPLES),
        NUM_TOKENS=int(H.NUM_TOKENS), num_warps=8,
    )  # fmt: skip
    return *inputs.unbind(), *entries.unbind(), cu_extend, *targets.unbind(), tiles
