"""Well-known model shapes without weights: for benchmarks with `--load-format dummy`, and checks before a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster.default_model import NAME as DEFAULT_NAME

_LLAMA_31 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "bos_token_id": 151643, "eos_token_id": [151645, 151643],
}  # fmt: skip
_SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _shape(family: dict, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict:
    return family | {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "dtype": "bfloat16",
    } | more  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _shape(_QWEN3, 1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "Qwen3-32B": _shape(_QWEN3, 5120, 25600, 64, 64, 8, tie_word_embeddings=False),
    "Llama-3.1-8B": _shape(_LLAMA_31, 4096, 14336, 32, 32, 8),
    "Llama-3.1-70B": _shape(_LLAMA_31, 8192, 28672, 80, 64, 8),
    DEFAULT_NAME: _shape(_SMOLLM2, 576, 1536, 30, 9, 3),
}
"""Model configurations by name, as their checkpoints' config.json has them (Hugging Face model pages)."""

_HUB_IDS = {
    f"HuggingFaceTB/{DEFAULT_NAME}": DEFAULT_NAME,
    "Qwen/Qwen3-0.6B": "Qwen3-0.6B",
    "Qwen/Qwen3-32B": "Qwen3-32B",
    "meta-llama/Llama-3.1-8B": "Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "Llama-3.1-70B",
    "meta-llama/Llama-3.1-70B-Instruct": "Llama-3.1-70B",
}


def preset_of(model: str | None, dummy: bool) -> str | None:
    """The preset with the shape of what `resolve_model` finds; None where only the checkpoint can say."""
    if model is None:
        return DEFAULT_NAME
    return model if dummy and model in PRESETS else _HUB_IDS.get(model)


def write_preset(name: str, directory: Path) -> Path:
    """`directory/NAME` with the preset's config.json; KeyError for an unknown name."""
    path = directory / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(PRESETS[name], indent=2))
    return path
