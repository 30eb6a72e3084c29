"""A checkpoint's config.json together with what it leaves out.

Such files name only what differs from the defaults of the family's configuration class in `transformers`; older ones
keep the rotary embedding in `rope_scaling` and `rope_theta`. Importing `transformers` for that takes seconds in every
rank, so the defaults stand here; a test compares the two.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from worker.errors import ModelError

_COMMON = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "head_dim": None,
    "sliding_window": None, "eos_token_id": None, "quantization_config": None,
}  # fmt: skip
_QWEN = {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    "use_sliding_window": False, "sliding_window": 4096,
}  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None, "max_position_embeddings": 2048,
        "eos_token_id": 2,
    },
    "mistral": {
        "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "eos_token_id": 2, "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
}  # fmt: skip
_DEFAULT_THETA = 10_000.0


def read_checkpoint_config(path: Path) -> SimpleNamespace:
    """The settings in `path/config.json` under the names that `transformers` gives them.

    `rope_parameters` is always a dict with `rope_type` and `rope_theta`; `dtype` a name or None.

    Raises:
        ModelError: no such file, or it is not a JSON object that names a `model_type`.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{path} is not a checkpoint directory: it has no config.json")
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise ModelError(f"cannot read {file}: it is not a JSON object with a model_type")
    values = _COMMON | _FAMILIES.get(found["model_type"], {}) | found
    if not values.get("use_sliding_window", True):
        values["sliding_window"] = None
    values["dtype"] = found.get("dtype") or found.get("torch_dtype")
    values["rope_parameters"] = _rope_parameters(found, values.get("max_position_embeddings"))
    return SimpleNamespace(**values)


def _rope_parameters(found: dict[str, Any], max_position_embeddings: int | None) -> dict[str, Any]:
    given = found.get("rope_scaling") or found.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ModelError(f"config.json: rope_scaling and rope_parameters must be objects, not {given!r}")
    params = dict(given)
    params.setdefault("rope_theta", found.get("rope_theta") or _DEFAULT_THETA)
    params.setdefault("rope_type", params.get("type", "default"))
    if found.get("partial_rotary_factor") is not None:
        params.setdefault("partial_rotary_factor", found["partial_rotary_factor"])
    if params["rope_type"] in ("llama3", "yarn"):
        original = found.get("original_max_position_embeddings")
        if original is not None:
            params["original_max_position_embeddings"] = original
        params.setdefault("original_max_position_embeddings", max_position_embeddings)
    return params
