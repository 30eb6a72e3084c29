"""The attention layer: fused q/k/v projection, norm and rotation, KV store, attention, output projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvcache.pool import local_kv_heads
from worker.batch import Batch
from worker.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from worker.layers.norm import RMSNorm
from worker.layers.shard import split_evenly
from worker.model_config import ModelConfig
from worker.models.context import ModelContext


class Attention(nn.Module):
    """Grouped-query attention over this rank's heads.

    Query heads are split evenly. KV heads are too, or, when there are fewer than ranks, each is held by several ranks.

    Args:
        qkv_bias, o_bias: whether the checkpoint has these biases.
        qk_norm: RMS norm over each head of q and k, before the rotation.
    """

    def __init__(
        self, config: ModelConfig, ctx: ModelContext, layer_id: int, qkv_bias: bool, o_bias: bool, qk_norm: bool
    ) -> None:
        super().__init__()
        self.ctx, self.layer_id = ctx, layer_id
        dim, tp, placed = config.head_dim, ctx.tp, {"dtype": ctx.dtype, "device": ctx.device}
        self.num_heads = config.num_heads // tp.size
        self.num_kv_heads, first_kv = local_kv_heads(config.num_kv_heads, tp.size, tp.rank)
        q_rows = split_evenly(config.num_heads * dim, tp.size, tp.rank)
        kv_rows = slice(first_kv * dim, (first_kv + self.num_kv_heads) * dim)
        parts = [
            Part("q_proj", config.num_heads * dim, q_rows),
            Part("k_proj", config.num_kv_heads * dim, kv_rows),
            Part("v_proj", config.num_kv_heads * dim, kv_rows),
        ]
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, parts, qkv_bias, **placed)
        self.o_proj = RowParallelLinear("o_proj", config.num_heads * dim, config.hidden_size, o_bias, tp, **placed)
        self.q_norm = RMSNorm("q_norm", dim, config.rms_norm_eps, **placed) if qk_norm else None
        self.k_norm = RMSNorm("k_norm", dim, config.rms_norm_eps, **placed) if qk_norm else None

    def forward(self, hidden: torch.Tensor, rope: Any, batch: Batch, outputs: Batch | None = None) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]; `rope` is this step's, from `LayerOps.rope_rows`.

        `outputs`: as in `DecoderLayer`; K/V of all tokens are stored, only these attend.
        """
        ctx = self.ctx
        q = ctx.ops.qkv_to_cache(
            self.qkv_proj(hidden), self.num_heads, self.num_kv_heads, self.q_norm, self.k_norm, rope,
            ctx.pool, self.layer_id, batch,
        )  # fmt: skip
        if outputs is not None:
            q, batch = q[batch.sample_index], outputs
        return self.o_proj(ctx.attention.forward(q, self.layer_id, batch).flatten(1))
