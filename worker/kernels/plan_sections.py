"""What a plan changes on the device, each section one kernel: page table, token pool, sampling parameters.

In torch these are some sixty small operations, a millisecond of host time for every step that admits a request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from scheduler.step import SAMPLING_WORDS, S
from worker.kernels.sample import GOLDEN_GAMMA, mix64

_BLOCK = 128
_PARTS = 4


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["delta_ptr"])  # a slice starts anywhere
def _page_deltas_kernel(delta_ptr, table_ptr, count, stride, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    row = tl.load(delta_ptr + 3 * at, mask=live, other=0).to(tl.int64)
    position = tl.load(delta_ptr + 3 * at + 1, mask=live, other=0)
    start = tl.load(delta_ptr + 3 * at + 2, mask=live, other=0)
    tl.store(table_ptr + row * stride + position // PAGE, start, mask=live)


def apply_page_deltas(deltas: torch.Tensor, page_starts: torch.Tensor, page_size: int) -> None:
    """`PageTable.apply`: int32[n, 3] `deltas` into int32[rows, pages] `page_starts`."""
    count = len(deltas)
    _page_deltas_kernel[(triton.cdiv(count, _BLOCK),)](
        deltas, page_starts, count, page_starts.stride(0), PAGE=page_size, BLOCK=_BLOCK, num_warps=4
    )


@triton.jit(do_not_specialize_on_alignment=["run_ptr", "id_ptr"])
def _token_runs_kernel(run_ptr, id_ptr, pool_ptr, stride, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    run = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, run, BLOCK):
        before += tl.load(run_ptr + 3 * (start + lane) + 2, mask=start + lane < run, other=0)
    ids = id_ptr + tl.sum(before, 0)
    row = tl.load(run_ptr + 3 * run).to(tl.int64)
    first = tl.load(run_ptr + 3 * run + 1)
    count = tl.load(run_ptr + 3 * run + 2)
    for start in range(tl.program_id(1) * BLOCK, count, PARTS * BLOCK):
        live = start + lane < count
        token = tl.load(ids + start + lane, mask=live, other=0)
        tl.store(pool_ptr + row * stride + first + start + lane, token, mask=live)


def write_token_runs(runs: torch.Tensor, ids: torch.Tensor, pool: torch.Tensor) -> None:
    """`TokenPool.write_runs`: int32[n, 3] `runs` of int32 `ids` into int32[rows, width] `pool`."""
    _token_runs_kernel[(len(runs), _PARTS)](runs, ids, pool, pool.stride(0), BLOCK=_BLOCK, PARTS=_PARTS, num_warps=4)


@triton.jit(do_not_specialize_on_alignment=["entry_ptr"])
def _sampling_kernel(
    entry_ptr, scale_ptr, noise_ptr, top_p_ptr, min_p_ptr, top_k_ptr, filtered_ptr, seed_key_ptr, until_ptr,
    vocab_size, lowest_temperature,
    WORDS: tl.constexpr, ROW: tl.constexpr, TEMPERATURE: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
    TOP_K: tl.constexpr, SEED_LOW: tl.constexpr, SEED_HIGH: tl.constexpr,
):  # fmt: skip
    entry = entry_ptr + tl.program_id(0) * WORDS
    row = tl.load(entry + ROW)
    temperature = tl.load(entry + TEMPERATURE).to(tl.float32, bitcast=True)
    top_p = tl.load(entry + TOP_P).to(tl.float32, bitcast=True)
    min_p = tl.load(entry + MIN_P).to(tl.float32, bitcast=True)
    top_k = tl.load(entry + TOP_K)
    has_k = (top_k > 0) & (top_k < vocab_size)
    noisy = temperature >= lowest_temperature
    tl.store(scale_ptr + row, tl.where(noisy, tl.div_rn(1.0, tl.where(noisy, temperature, 1.0)), 1.0))
    tl.store(noise_ptr + row, noisy.to(tl.float32))
    tl.store(top_p_ptr + row, top_p)
    tl.store(min_p_ptr + row, min_p)
    tl.store(top_k_ptr + row, tl.where(has_k, top_k, vocab_size).to(tl.int64))
    tl.store(filtered_ptr + row, noisy & (has_k | (top_p < 1.0) | (min_p > 0.0)))
    low = tl.load(entry + SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(entry + SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    tl.store(seed_key_ptr + row, mix64((high << 32 | low) + GOLDEN_GAMMA).to(tl.int64, bitcast=True))
    tl.store(until_ptr + row, 0)


def apply_sampling(
    entries: torch.Tensor, scale: torch.Tensor, noise: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
    top_k: torch.Tensor, filtered: torch.Tensor, seed_key: torch.Tensor, suppress_until: torch.Tensor,
    vocab_size: int, lowest_temperature: float,
) -> None:  # fmt: skip
    """int32[n, SAMPLING_WORDS] `entries` into the tensors of `SamplingState` by table row."""
    _sampling_kernel[(len(entries),)](
        entries, scale, noise, top_p, min_p, top_k, filtered, seed_key, suppress_until, vocab_size, lowest_temperature,
        WORDS=SAMPLING_WORDS, ROW=int(S.ROW), TEMPERATURE=int(S.TEMPERATURE), TOP_P=int(S.TOP_P), MIN_P=int(S.MIN_P),
        TOP_K=int(S.TOP_K), SEED_LOW=int(S.SEED_LOW), SEED_HIGH=int(S.SEED_HIGH), num_warps=1,
    )  # fmt: skip
