"""The small fused steps between matrix products: residual + RMSNorm, q/k norm + rope + KV store, SiLU-mul."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.launch import dependent_launch


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, eps, width, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    live = column < width
    x = tl.load(x_ptr + row + column, mask=live, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row + column, mask=live, other=0.0).to(tl.float32)
        # The rounded sum is what later layers read, so the norm sees it too.
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row + column, rounded, mask=live)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    weight = tl.load(weight_ptr + column, mask=live, other=0.0)
    normed = (x * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row + column, normed * weight, mask=live)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of `x` [T, width], or of `residual + x`, which is then written back to `residual`. Returns [T, width]."""
    out = torch.empty_like(x)
    tokens, width = x.shape
    block = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(tokens,)](
        x, residual if residual is not None else x, weight, out, eps, width,
        HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=max(1, min(16, block // 256)),
        **dependent_launch(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    gate = tl.load(x_ptr + row * 2 * width + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask=live, other=0.0)
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    tl.store(out_ptr + row * width + column, silu * up, mask=live)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of `gate_up` [T, 2 * width], gate first. Returns [T, width]."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul_kernel[(tokens, triton.cdiv(width, block))](
        gate_up, out, width, BLOCK=block, num_warps=4, **dependent_launch(out.device)
    )
    return out


@triton.jit
def _rope_store_kernel(
    qkv_ptr, q_out_ptr, position_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, k_ptr, v_ptr, loc_ptr,
    eps, qkv_stride, cos_stride, page_stride, slot_stride, head_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF_PAD: tl.constexpr, PAGE: tl.constexpr,
    HAS_NORM: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half: tl.constexpr = D // 2
    dim = tl.arange(0, HALF_PAD)
    live = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & (dim < half)[None, :]
    source = qkv_ptr + token * qkv_stride + head[:, None] * D + dim[None, :]
    low_raw = tl.load(source, mask=live, other=0.0)
    high_raw = tl.load(source + half, mask=live, other=0.0)
    low, high = low_raw.to(tl.float32), high_raw.to(tl.float32)
    is_q = head < Q_HEADS
    is_k = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    is_v = head >= Q_HEADS + KV_HEADS
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)
        live_half = dim < half
        q_low = tl.load(q_norm_ptr + dim, mask=live_half, other=0.0)
        q_high = tl.load(q_norm_ptr + half + dim, mask=live_half, other=0.0)
        k_low = tl.load(k_norm_ptr + dim, mask=live_half, other=0.0)
        k_high = tl.load(k_norm_ptr + half + dim, mask=live_half, other=0.0)
        weight_low = tl.where(is_q[:, None], q_low[None, :], k_low[None, :])
        weight_high = tl.where(is_q[:, None], q_high[None, :], k_high[None, :])
        # Rounded where an unfused norm would round.
        low = ((low * scale[:, None]).to(low_raw.dtype) * weight_low).to(tl.float32)
        high = ((high * scale[:, None]).to(low_raw.dtype) * weight_high).to(tl.float32)
    position = tl.load(position_ptr + token)
    cos = tl.load(cos_ptr + position * cos_stride + dim, mask=dim < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * cos_stride + dim, mask=dim < half, other=0.0).to(tl.float32)
    new_low = (low * cos[None, :] - high * sin[None, :]).to(low_raw.dtype)
    new_high = (high * cos[None, :] + low * sin[None, :]).to(low_raw.dtype)
    q_target = q_out_ptr + (token * Q_HEADS + head[:, None]) * D + dim[None, :]
    tl.store(q_target, new_low, mask=live & is_q[:, None])
    tl.store(q_target + half, new_high, mask=live & is_q[:, None])
    loc = tl.load(loc_ptr + token).to(tl.int64)
    base = (loc // PAGE) * page_stride + (loc % PAGE) * slot_stride
    k_target = k_ptr + base + (head[:, None] - Q_HEADS) * head_stride + dim[None, :]
    tl.store(k_target, new_low, mask=live & is_k[:, None])
    tl.store(k_target + half, new_high, mask=live & is_k[:, None])
    v_target = v_ptr + base + (head[:, None] - Q_HEADS - KV_HEADS) * head_stride + dim[None, :]
    tl.store(v_target, low_raw, mask=live & is_v[:, None])
    tl.store(v_target + half, high_raw, mask=live & is_v[:, None])


def rope_store(
    qkv: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, out_loc: torch.Tensor, num_q_heads: int,
    q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, eps: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Norm (optional) and rotate q and k, store k and v in the pool, return q [T, num_q_heads, head_dim].

    qkv: [T, (num_q_heads + 2 * num_kv_heads) * head_dim], heads q, k, v. positions, out_loc: [T].
    cos, sin: [max_position, head_dim / 2], attention factor included; pairs are (i, i + head_dim / 2) as in GPT-NeoX.
    k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim]. q_norm, k_norm: [head_dim].
    """
    tokens = qkv.shape[0]
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    q = torch.empty(tokens, num_q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    heads = 1 if tokens <= 16 else 4 if tokens <= 512 else 8
    _rope_store_kernel[(tokens, triton.cdiv(num_q_heads + 2 * num_kv_heads, heads))](
        qkv, q, positions, cos, sin, q_norm if q_norm is not None else qkv, k_norm if k_norm is not None else qkv,
        k_cache, v_cache, out_loc, eps, qkv.stride(0), cos.stride(0),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        Q_HEADS=num_q_heads, KV_HEADS=num_kv_heads, D=head_dim, HALF_PAD=triton.next_power_of_2(head_dim // 2),
        PAGE=page_size, HAS_NORM=q_norm is not None, HEADS=heads, num_warps=1 if heads <= 4 else 2,
        **dependent_launch(qkv.device),
    )  # fmt: skip
    return q
