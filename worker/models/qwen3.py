"""Qwen3 (dense)."""

from __future__ import annotations

from worker.model_config import ModelConfig
from worker.models.base import CausalLM, LayerOptions


class Qwen3ForCausalLM(CausalLM):
    """Each head of q and k is normed before the rotation; `attention_bias` covers all four projections."""

    @staticmethod
    def layer_options(config: ModelConfig) -> LayerOptions:
        return LayerOptions(qkv_bias=config.attention_bias, o_bias=config.attention_bias, qk_norm=True)
