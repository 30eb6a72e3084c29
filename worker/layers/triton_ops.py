"""`TritonOps`: the fused element-wise work as Triton kernels, for CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from worker.batch import Batch
from worker.kernels import elementwise
from worker.kernels.gated_gemm import MAX_ROWS, MIN_COLUMNS, gated_gemm
from worker.kernels.gemv import gemv, suits
from worker.layers.linear import ColumnParallelLinear
from worker.layers.norm import RMSNorm
from worker.layers.ops import LayerOps

if TYPE_CHECKING:
    from kvcache.pool import BaseKVCachePool


class TritonOps(LayerOps):
    """One kernel per method; intermediates round where the torch version rounds."""

    def rms_norm(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        return elementwise.add_rms_norm(x, None, norm.weight, norm.eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        return elementwise.add_rms_norm(x, residual, norm.weight, norm.eps)

    def gated(self, hidden: torch.Tensor, gate_up_proj: ColumnParallelLinear) -> torch.Tensor:
        weight, bias, rows = gate_up_proj.weight, gate_up_proj.bias, len(hidden)
        if suits(rows, weight):
            return gemv(hidden, weight, bias, gated=True)
        if rows <= MAX_ROWS and weight.shape[0] >= 2 * MIN_COLUMNS:
            return gated_gemm(hidden, weight, bias)
        return elementwise.silu_mul(gate_up_proj(hidden))

    def rope_rows(self, table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Any:
        return table  # the kernel looks its rows up

    def qkv_to_cache(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        rope: Any,
        pool: BaseKVCachePool,
        layer_id: int,
        batch: Batch,
    ) -> torch.Tensor:
        return elementwise.rope_store(
            qkv, batch.positions, rope[:, 0], rope[:, 1], pool.k_cache(layer_id), pool.v_cache(layer_id), batch.out_loc,
            num_heads, q_norm and q_norm.weight, k_norm and k_norm.weight, q_norm.eps if q_norm else 0.0,
        )  # fmt: skip
