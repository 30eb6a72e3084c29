"""The gated MLP: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import torch
from torch import nn

from worker.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from worker.layers.shard import split_evenly
from worker.model_config import ModelConfig
from worker.models.context import ModelContext


class GatedMLP(nn.Module):
    """Gate and up are one product; the intermediate size is split evenly over the ranks."""

    def __init__(self, config: ModelConfig, ctx: ModelContext, bias: bool) -> None:
        super().__init__()
        self.ctx = ctx
        hidden, inner, placed = config.hidden_size, config.intermediate_size, {"dtype": ctx.dtype, "device": ctx.device}
        rows = split_evenly(inner, ctx.tp.size, ctx.tp.rank)
        parts = [Part("gate_proj", inner, rows), Part("up_proj", inner, rows)]
        self.gate_up_proj = ColumnParallelLinear(hidden, parts, bias, **placed)
        self.down_proj = RowParallelLinear("down_proj", inner, hidden, bias, ctx.tp, **placed)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        return self.down_proj(self.ctx.ops.gated(hidden, self.gate_up_proj))
