"""x @ weight.T for one to a few rows of x: a matrix-vector product bound by reading the weight once, in Triton.

Library products are tuned for many rows; for one or two they leave much of the memory bandwidth unused.
`silu(gate) * up` can be taken in the same pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.launch import dependent_launch

MAX_WEIGHT = 8 << 20  # elements, for two rows: beyond, cuBLAS reads the weight faster


@triton.jit
def _gemv_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, size_n, size_k, x_stride, weight_stride, out_stride,
    ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live_n = n < size_n
    row = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    weight_row = weight_ptr + n[:, None].to(tl.int64) * weight_stride
    # Each block of the weight is fetched one turn ahead; the first one before the input is there.
    mask = live_n[:, None] & (k < size_k)[None, :]
    weight = tl.load(weight_row + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        up_row = weight_row + size_n.to(tl.int64) * weight_stride
        up = tl.load(up_row + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        up_sums = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Sums stay spread over BLOCK_K lanes until the end: one reduction per output, not one per block.
    sums = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    for _ in range(0, size_k, BLOCK_K):
        x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :], mask=(k < size_k)[None, :], other=0.0)
        x = x.to(tl.float32)
        k += BLOCK_K
        mask = live_n[:, None] & (k < size_k)[None, :]
        following = tl.load(weight_row + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        sums += weight[None, :, :].to(tl.float32) * x[:, None, :]
        weight = following
        if GATED:
            following = tl.load(up_row + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            up_sums += up[None, :, :].to(tl.float32) * x[:, None, :]
            up = following
    element = out_ptr.dtype.element_ty
    result = tl.sum(sums, 2)
    if HAS_BIAS:
        result += tl.load(bias_ptr + n, mask=live_n, other=0.0).to(tl.float32)[None, :]
    result = result.to(element)
    if GATED:
        up_result = tl.sum(up_sums, 2)
        if HAS_BIAS:
            up_result += tl.load(bias_ptr + size_n + n, mask=live_n, other=0.0).to(tl.float32)[None, :]
        gate = result.to(tl.float32)  # rounded where separate kernels would round
        result = (gate / (1.0 + tl.exp(-gate))).to(element) * up_result.to(element)
    tl.store(out_ptr + row[:, None] * out_stride + n[None, :], result, mask=live_n[None, :])


def suits(rows: int, weight: torch.Tensor) -> bool:
    """Whether `gemv` is the fastest product of so many rows with `weight`."""
    return rows == 1 or (rows == 2 and weight.numel() <= MAX_WEIGHT)


def gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x [R, K] (R is 1, 2 or 4) times weight [N, K] transposed, plus bias [N]: [R, N], summed in float32.

    `gated`: weight and bias hold gate and up, one after the other: silu(gate) * up, [R, N / 2].
    """
    rows, size_k = x.shape
    size_n = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = torch.empty(rows, size_n, dtype=x.dtype, device=x.device)
    block_n, block_k, warps = _blocks(size_n, size_k, gated)
    _gemv_kernel[(triton.cdiv(size_n, max(1, block_n // rows)),)](
        x, weight, bias if bias is not None else x, out, size_n, size_k, x.stride(0), weight.stride(0), out.stride(0),
        ROWS=rows, HAS_BIAS=bias is not None, GATED=gated, BLOCK_N=max(1, block_n // rows),
        BLOCK_K=min(block_k, triton.next_power_of_2(size_k)), num_warps=warps, **dependent_launch(x.device),
    )  # fmt: skip
    return out


def _blocks(size_n: int, size_k: int, gated: bool) -> tuple[int, int, int]:
    """Outputs a program (of one row), elements of k a turn, and warps, as measured on an H200."""
    if gated:
        return (4, 256, 4) if size_k <= 2048 else (2, 512, 2)
    if size_n <= 2048:  # few outputs want long runs along k
        return 4, 2048, 8
    if size_n <= 4096 and size_k > 2048:
        return 4, 512, 4
    if size_n <= 8192:
        return 2, 1024, 4
    return (4, 256, 2) if size_k <= 2048 else (8, 512, 4)
