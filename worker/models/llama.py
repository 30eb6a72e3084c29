"""Llama (Llama 2, 3, 3.1, 3.2, SmolLM2 and others that use its layout)."""

from __future__ import annotations

from worker.model_config import ModelConfig
from worker.models.base import CausalLM, LayerOptions


class LlamaForCausalLM(CausalLM):
    """Biases where the checkpoint's settings say so: `attention_bias` covers q, k, v and the output projection."""

    @staticmethod
    def layer_options(config: ModelConfig) -> LayerOptions:
        return LayerOptions(qkv_bias=config.attention_bias, o_bias=config.attention_bias, mlp_bias=config.mlp_bias)
