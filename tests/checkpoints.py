"""Tiny random checkpoints of every supported family, as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

_CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
# Eight query and two KV heads: tensor-parallel sizes 1, 2, 4 and 8; 4 and 8 replicate KV heads.
_SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FAMILY_SIZES = {"llama": {}, "mistral": {"sliding_window": None}, "qwen2": {}, "qwen3": {"head_dim": 16}}


def make_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """A tiny configuration of `family`; `overrides` are settings of its transformers configuration class."""
    return _CONFIGS[family](**(_SIZES | _FAMILY_SIZES[family] | overrides))


def make_checkpoint(
    family: str,
    path: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a checkpoint with random weights (norms and biases too) and return `path`.

    Args:
        family: one of `FAMILIES`.
        max_shard_size: as in `save_pretrained`: a small one ("20KB") writes several files and an index.
        overrides: settings of the family's transformers configuration class.
    """
    model = AutoModelForCausalLM.from_config(make_config(family, **overrides))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, 0.1, generator=generator)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    return Path(path)


def load_reference(path: str | Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The same checkpoint in transformers, for comparison."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
