"""`LayerOps`: the element-wise work between matrix products, each fused group one method.

Models call these through `ModelContext.ops`; a backend with fused kernels subclasses and overrides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from worker.batch import Batch
from worker.layers.linear import ColumnParallelLinear
from worker.layers.norm import RMSNorm

if TYPE_CHECKING:
    from kvcache.pool import BaseKVCachePool


class LayerOps:
    """The operations in plain torch, for any device."""

    def rms_norm(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension."""
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """`residual += x` in place, then its norm. Both [T, hidden_size]; `x` may be overwritten."""
        residual += x
        return F.rms_norm(residual, norm.weight.shape, norm.weight, norm.eps)

    def gated(self, hidden: torch.Tensor, gate_up_proj: ColumnParallelLinear) -> torch.Tensor:
        """silu(gate) * up of the projection's two parts: [T, hidden_size] -> [T, intermediate]."""
        gate, up = gate_up_proj(hidden).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rope_rows(self, table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Any:
        """What `qkv_to_cache` needs of the rope table (see `build_rope_table`), looked up once per step."""
        cos, sin = table[positions].to(dtype).unbind(1)
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]

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
        """Norm and rotate q and k, store k and v in the pool at `batch.out_loc`, return q.

        Args:
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], q then k then v; may be overwritten.
            rope: from `rope_rows`.

        Returns:
            q [T, num_heads, head_dim]; the last dimension is contiguous.
        """
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
        rotated, v = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
        if q_norm is not None:
            q, k = rotated.split((num_heads, num_kv_heads), dim=1)
            rotated = torch.cat((self.rms_norm(q, q_norm), self.rms_norm(k, k_norm)), dim=1)
        cos, sin = rope
        # The rotation pairs element i with i + head_dim / 2: a roll by half a head brings each its partner.
        rotated = torch.addcmul(rotated * cos, rotated.roll(rotated.shape[-1] // 2, -1), sin)
        q, k = rotated.split((num_heads, num_kv_heads), dim=1)
        pool.store_kv(k, v, batch.out_loc, layer_id)
        return q


def create_ops(device: torch.device) -> LayerOps:
    """The operations for `device`: Triton kernels on CUDA."""
    if device.type == "cuda":
        from worker.layers.triton_ops import TritonOps  # triton comes with torch for CUDA only

        return TritonOps()
    return LayerOps()
