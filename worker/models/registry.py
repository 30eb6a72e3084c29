"""Which model class serves which checkpoint."""

from __future__ import annotations

from importlib import import_module

from worker.errors import ModelError
from worker.model_config import ModelConfig
from worker.models.base import CausalLM
from worker.models.context import ModelContext

# `model_type` of a checkpoint's config.json -> module and class. A new family is one file and one line here.
_FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)

__all__ = ["SUPPORTED_ARCHITECTURES", "CausalLM", "ModelContext", "create_model"]


def create_model(config: ModelConfig, ctx: ModelContext) -> CausalLM:
    """This rank's shard of the model, its weights uninitialised: see `worker.weights.load_weights`.

    Raises:
        ModelError: a family we do not have, a tensor-parallel size that does not divide the model, or
            `ctx.max_seq_len` beyond what the model can do.
    """
    if config.architecture not in _FAMILIES:
        raise ModelError(
            f"model type {config.architecture!r} is not supported: supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    module, name = _FAMILIES[config.architecture]
    return getattr(import_module(f"worker.models.{module}"), name)(config, ctx)
