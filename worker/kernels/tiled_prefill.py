"""Causal paged attention for the prefills of a captured step, in Triton: the grid depends on the step's size only.

The loop is `prefill_attention`'s. Which tokens a program takes it reads from a list of tiles, and where a step has few
of them (a new turn of a long conversation, say) each tile's keys are cut into `splits` equal runs, so that they still
fill the card; the program that finishes last merges the partial softmaxes, as in `decode_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.decode_attention import LOG2E
from worker.kernels.prefill_attention import attend, block_sizes, dim_pad

PROGRAMS = 128
"""That fill the card once: one of them takes most of a multiprocessor's shared memory."""
MAX_SPLITS = 16


@triton.jit
def _tiled_prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, rows_ptr, cached_ptr, len_ptr, cu_ptr, tile_ptr, part_ptr, stat_ptr,
    done_ptr, scale_log2, q_stride, out_stride, table_stride, page_stride, slot_stride, head_stride, num_tiles,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PROGRAMS: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    live_tiles = tl.load(tile_ptr)
    kv_head = tl.program_id(0) % KV_HEADS
    number = tl.program_id(0) // KV_HEADS
    if number >= live_tiles * MAX_SPLITS:
        return
    splits = tl.minimum(MAX_SPLITS, tl.maximum(1, PROGRAMS // (live_tiles * KV_HEADS)))
    tile = number % live_tiles
    split = number // live_tiles
    if split >= splits:
        return
    entry = tl.load(tile_ptr + 1 + tile)
    block = tl.load(tile_ptr + 1 + num_tiles + tile)
    cached = tl.load(cached_ptr + entry)
    length = tl.load(len_ptr + entry)
    reach = tl.minimum(length, cached + (block + 1) * TOKENS)
    blocks_per_split = tl.cdiv(tl.cdiv(reach, BLOCK_N), splits)
    first = split * blocks_per_split * BLOCK_N
    last = tl.minimum(reach, first + blocks_per_split * BLOCK_N)
    if first >= reach:
        return

    line = tl.arange(0, BLOCK_M)  # of the tile: token by token, the group's heads side by side
    token = block * TOKENS + line // GROUP
    live_q = (line < TOKENS * GROUP) & (token < length - cached)
    dim = tl.arange(0, D_PAD)
    live_dim = dim < D
    index = (tl.load(cu_ptr + entry) + token).to(tl.int64)
    column = (kv_head * GROUP + line % GROUP) * D
    q_mask = live_q[:, None] & live_dim[None, :]
    q = tl.load(q_ptr + (index * q_stride + column)[:, None] + dim[None, :], mask=q_mask, other=0.0)
    table = table_ptr + tl.load(rows_ptr + entry).to(tl.int64) * table_stride
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    position_q = cached + token
    diagonal = (cached + block * TOKENS + 1) // BLOCK_N * BLOCK_N  # the tile's first token sees all keys before it
    acc, best, total = attend(
        acc, best, total, q, k_ptr, v_ptr, table, position_q, first, tl.minimum(last, diagonal), length, scale_log2,
        page_stride, slot_stride, dim, live_dim, PAGE, BLOCK_N, False,
    )  # fmt: skip
    acc, best, total = attend(
        acc, best, total, q, k_ptr, v_ptr, table, position_q, tl.maximum(first, diagonal), last, length, scale_log2,
        page_stride, slot_stride, dim, live_dim, PAGE, BLOCK_N, True,
    )  # fmt: skip

    out = out_ptr + (index * out_stride + column)[:, None] + dim[None, :]
    used = tl.cdiv(tl.cdiv(reach, BLOCK_N), blocks_per_split)
    if used == 1:
        tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)
    else:
        pair = tile * KV_HEADS + kv_head
        slot = (pair * splits + split) * BLOCK_M + line
        tl.store(part_ptr + slot[:, None] * D_PAD + dim[None, :], acc)
        tl.store(stat_ptr + slot * 2, best)
        tl.store(stat_ptr + slot * 2 + 1, total)
        tl.debug_barrier()  # every thread's partial is written before the count says so
        arrived = tl.atomic_add(done_ptr + pair, 1, sem="acq_rel")
        if arrived == used - 1:
            best = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
            for other in range(
                used
            ):  # the first run has a key that every token sees, so `best` is finite from there on
                slot = (pair * splits + other) * BLOCK_M + line
                part_best = tl.load(stat_ptr + slot * 2, cache_modifier=".cg")
                part_total = tl.load(stat_ptr + slot * 2 + 1, cache_modifier=".cg")
                part = tl.load(part_ptr + slot[:, None] * D_PAD + dim[None, :], cache_modifier=".cg")
                new_best = tl.maximum(best, part_best)
                rescale = tl.exp2(best - new_best)
                part_scale = tl.exp2(part_best - new_best)
                total = total * rescale + part_total * part_scale
                acc = acc * rescale[:, None] + part * part_scale[:, None]
                best = new_best
            tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)
            tl.store(done_ptr + pair, 0)  # ready for the next layer


def tile_tokens(num_tokens: int, group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Tokens of a tile, `group` query heads each, in steps of up to `num_tokens`."""
    return block_sizes(num_tokens, group, head_dim, dtype)[0] // group


class TiledPrefill:
    """Workspace and launch of the kernel for one model shape.

    Args:
        num_q_heads, num_kv_heads: heads of this rank; `num_q_heads` is a multiple of `num_kv_heads`.
        head_dim: up to 256.
    """

    def __init__(
        self, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.group = num_q_heads // num_kv_heads
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        lines = PROGRAMS * block_sizes(1 << 20, self.group, head_dim, dtype)[0]  # with more programs nothing is split
        self.partials = torch.empty(lines * dim_pad(head_dim), dtype=torch.float32, device=device)
        self.stats = torch.empty(lines * 2, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor,
        page_starts: torch.Tensor, rows: torch.Tensor, cached_len: torch.Tensor, device_len: torch.Tensor,
        cu_extend: torch.Tensor, tiles: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Attend the new tokens of E entries causally to everything before them; returns `out`.

        All but the last as of `prefill_attention`. tiles: int32[1 + 2 * N]: how many tiles there are, of at most N the
        entry, and of each which run of `tile_tokens(T, ..)` of its tokens.
        """
        block_m, block_n, warps, stages = block_sizes(len(q), self.group, self.head_dim, q.dtype)
        num_tiles = len(tiles) // 2
        _tiled_prefill_kernel[(max(num_tiles * self.num_kv_heads, PROGRAMS),)](
            q, k_cache, v_cache, out, page_starts, rows, cached_len, device_len, cu_extend, tiles, self.partials,
            self.stats, self.arrived, self.head_dim**-0.5 * LOG2E, q.stride(0), out.stride(0), page_starts.stride(0),
            k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), num_tiles,
            PAGE=k_cache.shape[1], KV_HEADS=self.num_kv_heads, GROUP=self.group, D=self.head_dim,
            D_PAD=dim_pad(self.head_dim), BLOCK_M=block_m, BLOCK_N=block_n, PROGRAMS=PROGRAMS, MAX_SPLITS=MAX_SPLITS,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return out
