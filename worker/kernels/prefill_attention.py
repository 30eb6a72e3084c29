"""Causal paged attention for prefill rows of any length, in Triton.

FlashAttention-2's loop (https://arxiv.org/abs/2307.08691) over keys found through the page table. One program handles
a run of query tokens of one entry, for all query heads of one KV head at once: K and V are read once for the group, and
a few new tokens over a long prefix still fill the tile. Programs with most keys start first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.decode_attention import LOG2E


@triton.jit
def attend(
    acc, best, total, q, k_ptr, v_ptr, table, position_q, first, last, length, scale_log2,
    page_stride, slot_stride, dim, live_dim,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        live = position < length
        page_start = tl.load(table + position // PAGE, mask=live, other=0)
        offset = (page_start // PAGE).to(tl.int64) * page_stride + (position % PAGE) * slot_stride
        mask = live[:, None] & live_dim[None, :]
        k = tl.load(k_ptr + offset[:, None] + dim[None, :], mask=mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if MASKED:
            score = tl.where(position[None, :] <= position_q[:, None], score, float("-inf"))
        v = tl.load(v_ptr + offset[:, None] + dim[None, :], mask=mask, other=0.0)
        new_best = tl.maximum(best, tl.max(score, 1))
        # A token that sees none of these keys has no maximum yet.
        shift = tl.where(new_best == float("-inf"), 0.0, new_best) if MASKED else new_best
        weight = tl.exp2(score - shift[:, None])
        rescale = tl.exp2(best - shift)
        total = total * rescale + tl.sum(weight, 1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        best = new_best
    return acc, best, total


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "cached_ptr", "len_ptr", "cu_ptr"])  # slices start anywhere
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, rows_ptr, cached_ptr, len_ptr, cu_ptr,
    scale_log2, q_stride, out_stride, table_stride, page_stride, slot_stride, head_stride,
    PAGE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    entry = tl.program_id(2)
    kv_head = tl.program_id(1)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    cached = tl.load(cached_ptr + entry)
    length = tl.load(len_ptr + entry)
    if block * TOKENS >= length - cached:
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
    reach = tl.minimum(length, cached + (block + 1) * TOKENS)
    diagonal = (cached + block * TOKENS + 1) // BLOCK_N * BLOCK_N  # the tile's first token sees all keys before it
    acc, best, total = attend(
        acc, best, total, q, k_ptr, v_ptr, table, position_q, 0, diagonal, length, scale_log2,
        page_stride, slot_stride, dim, live_dim, PAGE, BLOCK_N, False,
    )  # fmt: skip
    acc, best, total = attend(
        acc, best, total, q, k_ptr, v_ptr, table, position_q, diagonal, reach, length, scale_log2,
        page_stride, slot_stride, dim, live_dim, PAGE, BLOCK_N, True,
    )  # fmt: skip
    out = out_ptr + (index * out_stride + column)[:, None] + dim[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)


def prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor, page_starts: torch.Tensor,
    rows: torch.Tensor, cached_len: torch.Tensor, device_len: torch.Tensor, cu_extend: torch.Tensor, max_extend: int,
) -> torch.Tensor:  # fmt: skip
    """Attend the new tokens of E entries causally to everything before them; returns `out`.

    q, out: [T, num_q_heads, head_dim]; only the entries' tokens are read and written. k_cache, v_cache: [num_pages,
    page_size, num_kv_heads, head_dim]. page_starts: [rows, pages] int32. rows, cached_len, device_len: [E] int32.
    cu_extend: int32, each entry's first token in q. max_extend: longest entry (host int).
    """
    num_kv_heads, page_size, head_dim = k_cache.shape[2], k_cache.shape[1], q.shape[2]
    group = q.shape[1] // num_kv_heads
    block_m, block_n, warps, stages = block_sizes(max_extend, group, head_dim, q.dtype)
    _prefill_kernel[(triton.cdiv(max_extend, block_m // group), num_kv_heads, rows.shape[0])](
        q, k_cache, v_cache, out, page_starts, rows, cached_len, device_len, cu_extend,
        head_dim**-0.5 * LOG2E, q.stride(0), out.stride(0), page_starts.stride(0),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        PAGE=page_size, GROUP=group, D=head_dim, D_PAD=dim_pad(head_dim),
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def block_sizes(max_extend: int, group: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Lines of a tile (tokens times `group` heads) where the longest entry has `max_extend` tokens, keys a turn, warps
    and stages."""
    lines = max_extend * group
    block_m = 128 if lines > 64 else 64 if lines > 32 else 32
    block_n, warps, stages = (128, 8, 3) if block_m == 128 else (64, 4, 3)
    if dim_pad(head_dim) > 128 or dtype == torch.float32:
        block_m, block_n, warps, stages = min(block_m, 64), 32, 4, 2
    return max(block_m, triton.next_power_of_2(group)), block_n, warps, stages


def dim_pad(head_dim: int) -> int:
    """The head's size in a tile: a power of two, as tl.dot takes it."""
    return max(16, triton.next_power_of_2(head_dim))
