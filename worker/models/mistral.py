"""Mistral."""

from __future__ import annotations

from worker.model_config import ModelConfig
from worker.models.base import CausalLM, LayerOptions


class MistralForCausalLM(CausalLM):
    """No biases. Early checkpoints attend over a sliding window: served up to its length, where it changes nothing."""

    @staticmethod
    def layer_options(config: ModelConfig) -> LayerOptions:
        return LayerOptions()
