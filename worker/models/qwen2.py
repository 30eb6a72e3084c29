"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from worker.model_config import ModelConfig
from worker.models.base import CausalLM, LayerOptions


class Qwen2ForCausalLM(CausalLM):
    """q, k and v always have biases, which no setting of the checkpoint names; the output projection has none."""

    @staticmethod
    def layer_options(config: ModelConfig) -> LayerOptions:
        return LayerOptions(qkv_bias=True)
