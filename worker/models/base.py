"""The decoder that all families share; a family says which biases and norms its layers have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from worker.batch import Batch
from worker.layers.attention import Attention
from worker.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from worker.layers.mlp import GatedMLP
from worker.layers.norm import RMSNorm
from worker.layers.rope import build_rope_table
from worker.model_config import ModelConfig, check_tp_size
from worker.models.context import ModelContext


@dataclass(frozen=True)
class LayerOptions:
    """How a family's layers differ."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: ModelConfig, ctx: ModelContext, layer_id: int, options: LayerOptions) -> None:
        super().__init__()
        self.ctx = ctx
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm("input_layernorm", size, eps, ctx.dtype, ctx.device)
        self.self_attn = Attention(config, ctx, layer_id, options.qkv_bias, options.o_bias, options.qk_norm)
        self.post_attention_layernorm = RMSNorm("post_attention_layernorm", size, eps, ctx.dtype, ctx.device)
        self.mlp = GatedMLP(config, ctx, options.mlp_bias)

    def forward(
        self, delta: torch.Tensor | None, residual: torch.Tensor, rope: Any, batch: Batch, outputs: Batch | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual, and what is still to be added to it; both [T, hidden_size].

        `delta` is what the previous layer left to be added, None in the first. `residual` is updated in place.
        `outputs`: the S tokens at `batch.sample_index`, if nobody needs the others' output: [S, hidden_size].
        """
        ops = self.ctx.ops
        if delta is None:
            hidden = ops.rms_norm(residual, self.input_layernorm)
        else:
            hidden = ops.add_rms_norm(delta, residual, self.input_layernorm)
        delta = self.self_attn(hidden, rope, batch, outputs)
        if outputs is not None:
            residual = residual[batch.sample_index]
        return residual, self.mlp(ops.add_rms_norm(delta, residual, self.post_attention_layernorm))


class Decoder(nn.Module):
    """Embedding, layers, final norm: the checkpoint's `model.` tensors."""

    def __init__(self, config: ModelConfig, ctx: ModelContext, options: LayerOptions) -> None:
        super().__init__()
        self.ctx = ctx
        placed = {"dtype": ctx.dtype, "device": ctx.device}
        self.embed_tokens = VocabParallelEmbedding(
            "embed_tokens", config.vocab_size, config.hidden_size, ctx.tp, **placed
        )
        self.layers = nn.ModuleList(DecoderLayer(config, ctx, i, options) for i in range(config.num_layers))
        self.norm = RMSNorm("norm", config.hidden_size, config.rms_norm_eps, **placed)
        self.rope_table = build_rope_table(config, ctx.max_seq_len or config.context_limit, ctx.device)

    def forward(self, batch: Batch) -> torch.Tensor:
        ops = self.ctx.ops
        residual = self.embed_tokens(batch.input_ids)
        rope = ops.rope_rows(self.rope_table, batch.positions, self.ctx.dtype)
        self.ctx.attention.prepare(batch)
        delta = None
        *body, last = self.layers
        for layer in body:
            residual, delta = layer(delta, residual, rope, batch)
        if batch.outputs is not None:
            self.ctx.attention.prepare(batch.outputs)
        residual, delta = last(delta, residual, rope, batch, batch.outputs)
        return ops.add_rms_norm(delta, residual, self.norm)


class CausalLM(nn.Module):
    """A decoder with its LM head: the base of every family.

    vocab_size    ids of the model
    vocab_start   first id of this rank's shard of the logits
    """

    def __init__(self, config: ModelConfig, ctx: ModelContext) -> None:
        super().__init__()
        check_tp_size(config, ctx.tp.size)
        if ctx.max_seq_len is not None:
            config.check_max_seq_len(ctx.max_seq_len)
        self.config = config
        self.ctx = ctx
        self.model = Decoder(config, ctx, self.layer_options(config))
        self.lm_head = ParallelLMHead(
            "lm_head", config.vocab_size, config.hidden_size, ctx.tp, ctx.dtype, ctx.device,
            tied=self.model.embed_tokens if config.tie_word_embeddings else None,
        )  # fmt: skip
        self.vocab_size = config.vocab_size
        self.vocab_start = self.lm_head.vocab_start

    @staticmethod
    def layer_options(config: ModelConfig) -> LayerOptions:
        """What a family's checkpoints have in their layers."""
        raise NotImplementedError

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Run a step: stores its K/V and returns the normed hidden states, [T, hidden_size] in `ctx.dtype`.

        With `batch.outputs` those of its S tokens alone: the last layer computes no others.
        """
        return self.model(batch)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[S, hidden_size] -> [S, local_vocab] in `ctx.dtype`: column j is id `vocab_start + j`; padding ids are -inf.

        Written into `out` if given (CUDA only).
        """
        return self.lm_head(hidden, out)
