"""Well-known model shapes without weights, for benchmarks with `--load-format dummy`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
}
"""Model configurations by name, as their checkpoints' config.json has them (Hugging Face model pages)."""


def write_preset(name: str, directory: Path) -> Path:
    """`directory/NAME` with the preset's config.json; KeyError for an unknown name."""
    path = directory / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(PRESETS[name], indent=2))
    return path
