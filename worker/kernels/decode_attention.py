"""Split-KV paged attention for decode rows (one query token a row), in Triton.

One program handles one (row, KV head, split) and all query heads of that KV head, so each K/V byte is read once.
A row's keys are cut into `splits` equal runs of key blocks; the program that finishes last merges the partial
softmaxes (flash-decoding: https://pytorch.org/blog/flash-decoding/), so there is one launch a layer. The grid depends
on the batch size only, lengths are read on the device: the kernel can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.launch import dependent_launch

LOG2E = 1.4426950408889634


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "len_ptr"])  # slices of a step's arrays start anywhere
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, rows_ptr, len_ptr, part_ptr, stat_ptr, done_ptr,
    scale_log2, q_stride, out_stride, table_stride, page_stride, slot_stride, head_stride,
    PAGE: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    entry = tl.program_id(1)
    split = tl.program_id(2)
    num_kv_heads = tl.num_programs(0)
    length = tl.load(len_ptr + entry)
    blocks_per_split = tl.cdiv(tl.cdiv(length, BLOCK_N), SPLITS)
    first = split * blocks_per_split * BLOCK_N
    last = tl.minimum(length, first + blocks_per_split * BLOCK_N)
    if first >= length:
        return

    group = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, D_PAD)
    live_dim = dim < D
    q_head = head * GROUP + group
    q_mask = (group < GROUP)[:, None] & live_dim[None, :]
    q = tl.load(q_ptr + entry.to(tl.int64) * q_stride + q_head[:, None] * D + dim[None, :], mask=q_mask, other=0.0)
    table = table_ptr + tl.load(rows_ptr + entry).to(tl.int64) * table_stride

    best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    for start in range(first, last, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        live = position < last
        page_start = tl.load(table + position // PAGE, mask=live, other=0)
        offset = (page_start // PAGE).to(tl.int64) * page_stride + (position % PAGE) * slot_stride + head * head_stride
        mask = live[:, None] & live_dim[None, :]
        k = tl.load(k_ptr + offset[:, None] + dim[None, :], mask=mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        score = tl.where(live[None, :], score, float("-inf"))
        v = tl.load(v_ptr + offset[:, None] + dim[None, :], mask=mask, other=0.0)
        new_best = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp2(score - new_best[:, None])
        rescale = tl.exp2(best - new_best)
        total = total * rescale + tl.sum(weight, 1)
        acc = acc * rescale[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        best = new_best

    out = out_ptr + entry.to(tl.int64) * out_stride + q_head[:, None] * D + dim[None, :]
    if SPLITS == 1:
        tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)
    else:
        used = tl.cdiv(tl.cdiv(length, BLOCK_N), blocks_per_split)
        pair = entry * num_kv_heads + head
        slot = (pair * SPLITS + split) * GROUP_PAD + group
        tl.store(part_ptr + slot[:, None] * D_PAD + dim[None, :], acc)
        tl.store(stat_ptr + slot * 2, best)
        tl.store(stat_ptr + slot * 2 + 1, total)
        tl.debug_barrier()  # every thread's partial is written before the count says so
        arrived = tl.atomic_add(done_ptr + pair, 1, sem="acq_rel")
        if arrived == used - 1:
            best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
            total = tl.zeros([GROUP_PAD], tl.float32)
            acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
            for other in range(used):
                slot = (pair * SPLITS + other) * GROUP_PAD + group
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


class DecodeAttention:
    """Workspace and launch of the decode kernel for one model shape.

    Args:
        num_q_heads, num_kv_heads: heads of this rank; `num_q_heads` is a multiple of `num_kv_heads`.
        head_dim: up to 256.
        page_size: tokens per page of the pool.
        max_entries: largest number of decode rows in one step.
        num_programs: programs that fill the card a few times over; decides how many splits a batch size gets.
        max_splits: of one row.
    """

    def __init__(
        self, num_q_heads: int, num_kv_heads: int, head_dim: int, page_size: int, max_entries: int,
        device: torch.device, num_programs: int = 256, max_splits: int = 16,
    ) -> None:  # fmt: skip
        self.num_kv_heads, self.head_dim, self.page_size = num_kv_heads, head_dim, page_size
        self.group = num_q_heads // num_kv_heads
        self.group_pad = max(16, triton.next_power_of_2(self.group))
        self.dim_pad = max(16, triton.next_power_of_2(head_dim))  # what tl.dot takes
        self.num_programs, self.max_splits = num_programs, max_splits
        self.scale_log2 = head_dim**-0.5 * LOG2E
        split = [n * self.splits(n) for n in range(1, max_entries + 1) if self.splits(n) > 1]  # others have no partials
        slots = max(split, default=1) * num_kv_heads * self.group_pad
        self.partials = torch.empty(slots * self.dim_pad, dtype=torch.float32, device=device)
        self.stats = torch.empty(slots * 2, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_entries * num_kv_heads, dtype=torch.int32, device=device)

    def splits(self, num_entries: int) -> int:
        """Splits per row at this batch size: a power of two, enough programs to fill the card."""
        wanted = self.num_programs // max(1, num_entries * self.num_kv_heads)
        return max(1, min(self.max_splits, 1 << max(0, wanted.bit_length() - 1)))

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor,
        page_starts: torch.Tensor, rows: torch.Tensor, device_len: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Attend `q` [B, num_q_heads, head_dim] to each row's first `device_len` tokens; returns `out`, same shape.

        `k_cache`, `v_cache`: [num_pages, page_size, num_kv_heads, head_dim], any page stride, unit head_dim stride.
        `page_starts` [rows, pages] int32: first slot of each page. `rows`, `device_len`: [B] int32.
        """
        num_entries = q.shape[0]
        splits = self.splits(num_entries)
        # Measured on an H200: wide key blocks while programs are few, narrow ones with two warps once they are many.
        # Narrow ones for one row alone, too: they leave room for the product behind it, which begins early.
        block_n, warps, stages = (128, 4, 4) if num_entries * self.num_kv_heads * splits < 1024 else (64, 2, 4)
        if num_entries == 1:
            block_n, warps = 64, 4
        if q.dtype == torch.float32 or self.dim_pad > 128:
            block_n, stages = 32, 2
        _decode_kernel[(self.num_kv_heads, num_entries, splits)](
            q, k_cache, v_cache, out, page_starts, rows, device_len, self.partials, self.stats, self.arrived,
            self.scale_log2, q.stride(0), out.stride(0), page_starts.stride(0),
            k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            PAGE=self.page_size, GROUP=self.group, GROUP_PAD=self.group_pad, D=self.head_dim, D_PAD=self.dim_pad,
            BLOCK_N=block_n, SPLITS=splits, num_warps=warps, num_stages=stages,
            **dependent_launch(q.device),
        )  # fmt: skip
        return out
