"""silu(x @ gate.T) * (x @ up.T) for a decode batch of 2 to 128 rows: bound by reading the weight, in Triton.

The weight is the left operand (64 of its rows fill a tensor-core instruction whatever the batch), the batch the right
one. A program computes the gate and the up half of the same columns, so their product needs no second kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.launch import dependent_launch

MAX_ROWS = 128  # beyond, cuBLAS and a separate kernel are faster
MIN_COLUMNS = 8192  # below, there are too few programs to fill the card


@triton.jit
def _gated_gemm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, size_m, size_n, size_k, x_stride, out_stride,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    live_n = n < size_n
    live_m = m < size_m
    gate_rows = weight_ptr + tl.where(live_n, n, 0).to(tl.int64)[:, None] * size_k + k[None, :]
    up_rows = gate_rows + size_n.to(tl.int64) * size_k
    x = x_ptr + tl.where(live_m, m, 0)[None, :] * x_stride + k[:, None]
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, size_k, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            xs = tl.load(x + start)
            gates = tl.load(gate_rows + start, eviction_policy="evict_first")
            ups = tl.load(up_rows + start, eviction_policy="evict_first")
        else:
            live_k = start + k < size_k
            xs = tl.load(x + start, mask=live_k[:, None], other=0.0)
            gates = tl.load(gate_rows + start, mask=live_k[None, :], other=0.0, eviction_policy="evict_first")
            ups = tl.load(up_rows + start, mask=live_k[None, :], other=0.0, eviction_policy="evict_first")
        gate = tl.dot(gates, xs, gate, input_precision="ieee")
        up = tl.dot(ups, xs, up, input_precision="ieee")
    if HAS_BIAS:
        gate += tl.load(bias_ptr + n, mask=live_n, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptr + size_n + n, mask=live_n, other=0.0).to(tl.float32)[:, None]
    # Rounded where separate kernels would round.
    element = out_ptr.dtype.element_ty
    rounded = gate.to(element).to(tl.float32)
    silu = (rounded / (1.0 + tl.exp(-rounded))).to(element)
    live = live_n[:, None] & live_m[None, :]
    tl.store(out_ptr + m[None, :] * out_stride + n[:, None], silu * up.to(element), mask=live)


def gated_gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up of x [M, K] and weight [2 * N, K] (gate's rows first, contiguous), M up to `MAX_ROWS`: [M, N]."""
    rows, size_k = x.shape
    size_n = weight.shape[0] // 2
    out = torch.empty(rows, size_n, dtype=x.dtype, device=x.device)
    block_m = max(16, triton.next_power_of_2(rows))
    # Measured on an H200 with 14336 x 4096.
    block_n, block_k, stages = (128, 128, 3) if block_m == 16 else (64, 64, 4) if block_m <= 64 else (64, 64, 3)
    if x.dtype == torch.float32:
        block_n, block_k, stages = 32, 32, 2
    _gated_gemm_kernel[(triton.cdiv(size_n, block_n),)](
        x, weight, bias if bias is not None else x, out, rows, size_n, size_k, x.stride(0), out.stride(0),
        HAS_BIAS=bias is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, EVEN_K=size_k % block_k == 0,
        STAGES=stages, num_warps=4, **dependent_launch(x.device),
    )  # fmt: skip
    return out
