"""x @ weight.T for one to a few rows of x: a matrix-vector product bound by reading the weight once, in Triton.

Library products are tuned for many rows; for one to four they leave much of the memory bandwidth unused.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.launch import dependent_launch

ROWS = (1, 2, 4)


@triton.jit
def _gemv_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, size_n, size_k, x_stride, weight_stride, out_stride,
    ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live_n = n < size_n
    row = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    weight_row = weight_ptr + n[:, None].to(tl.int64) * weight_stride
    # Each block of the weight is fetched one turn ahead; the first one before the input is there.
    weight = tl.load(
        weight_row + k[None, :], mask=live_n[:, None] & (k < size_k)[None, :], other=0.0, eviction_policy="evict_first"
    )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Sums stay spread over BLOCK_K lanes until the end: one reduction per output, not one per block.
    sums = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    for _ in range(0, size_k, BLOCK_K):
        x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :], mask=(k < size_k)[None, :], other=0.0)
        k += BLOCK_K
        following = tl.load(
            weight_row + k[None, :], mask=live_n[:, None] & (k < size_k)[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        sums += weight[None, :, :].to(tl.float32) * x[:, None, :].to(tl.float32)
        weight = following
    result = tl.sum(sums, 2)
    if HAS_BIAS:
        result += tl.load(bias_ptr + n, mask=live_n, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + row[:, None] * out_stride + n[None, :], result.to(out_ptr.dtype.element_ty), mask=live_n[None, :]
    )


def gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [R, K] (R is 1, 2 or 4) times weight [N, K] transposed, plus bias [N]: [R, N], summed in float32."""
    rows, size_k = x.shape
    size_n = weight.shape[0]
    if out is None:
        out = torch.empty(rows, size_n, dtype=x.dtype, device=x.device)
    # Measured on an H200: few outputs want long runs along k, many outputs want more of them per program.
    block_n, block_k, warps = (4, 2048, 8) if size_n <= 2048 else (8, 512, 4)
    block_n = max(1, block_n // rows)
    block_k = min(block_k, triton.next_power_of_2(size_k))
    _gemv_kernel[(triton.cdiv(size_n, block_n),)](
        x, weight, bias if bias is not None else x, out, size_n, size_k, x.stride(0), weight.stride(0), out.stride(0),
        ROWS=rows, HAS_BIAS=bias is not None, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps,
        **dependent_launch(x.device),
    )  # fmt: skip
    return out
