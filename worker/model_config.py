"""`ModelConfig`: the numbers of a checkpoint that the worker needs, whatever the family."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from worker.checkpoint_config import read_checkpoint_config
from worker.errors import ModelError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding as `transformers` describes it: `params` are the keys of its `rope_parameters`."""

    rope_type: str
    theta: float
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of one decoder-only model.

    architecture             `model_type` of the checkpoint: a key of the model registry
    max_position_embeddings  as the checkpoint says; `context_limit` adds what its rope scaling extends
    sliding_window           attention reaches this many tokens back; None: all
    attention_bias, mlp_bias the checkpoint's settings; a family may have biases that no setting names
    eos_token_ids            generation_config.json first, then config.json; empty if neither names one
    dtype                    the checkpoint's
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    sliding_window: int | None
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def from_pretrained(cls, source: str | Path | Any) -> ModelConfig:
        """Read a checkpoint directory, or convert a `transformers` config object.

        Raises:
            ModelError: no readable config.json, or something in it that we do not support.
        """
        if not isinstance(source, (str, Path)):
            return _convert(source, None)
        path = Path(source)
        config = read_checkpoint_config(path)
        try:
            return _convert(config, _generation_eos(path))
        except (AttributeError, TypeError, ValueError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"cannot read {path / 'config.json'}: {error}") from error

    @property
    def context_limit(self) -> int:
        """Longest sequence (prompt and output) in tokens that the positions and the attention window allow."""
        limit = self.max_position_embeddings
        if self.rope.rope_type in ("linear", "dynamic"):
            # For these, transformers keeps `max_position_embeddings` at the length before scaling.
            limit = int(limit * self.rope.params["factor"])
        elif self.rope.rope_type == "yarn":
            original = self.rope.params["original_max_position_embeddings"]
            limit = max(limit, int(original * (self.rope.params["factor"] or 1)))
        return limit if self.sliding_window is None else min(limit, self.sliding_window)

    def compute_dtype(self, name: str, device: str) -> torch.dtype:
        """What weights and activations are computed in; "auto": float32 on the CPU, the checkpoint's on CUDA."""
        if name != "auto":
            return getattr(torch, name)
        return torch.float32 if device == "cpu" else self.dtype

    def check_max_seq_len(self, max_seq_len: int) -> None:
        """Raises ModelError if sequences of `max_seq_len` tokens would leave the model's positions or its window."""
        if max_seq_len <= self.context_limit:
            return
        if self.sliding_window is not None and max_seq_len > self.sliding_window:
            raise ModelError(
                f"max_seq_len {max_seq_len} exceeds the model's sliding attention window of {self.sliding_window} "
                f"tokens, and attention over a sliding window is not supported: set max_seq_len to "
                f"{self.context_limit} or less"
            )
        raise ModelError(
            f"max_seq_len {max_seq_len} exceeds the model's limit of {self.context_limit} tokens: "
            f"set max_seq_len to {self.context_limit} or less"
        )


def valid_tp_sizes(config: ModelConfig) -> list[int]:
    """The tensor-parallel sizes this model divides into, ascending.

    Query heads and the MLP must divide by the size; KV heads must divide, or the size must be a multiple of their
    number (each head is then held by several ranks).
    """
    return [
        size
        for size in range(1, config.num_heads + 1)
        if config.num_heads % size == 0
        and config.intermediate_size % size == 0
        and (config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0)
    ]


def check_tp_size(config: ModelConfig, tp_size: int) -> None:
    """Raises ModelError, naming the sizes that would work, if the model does not divide by `tp_size`."""
    sizes = valid_tp_sizes(config)
    if tp_size not in sizes:
        raise ModelError(
            f"tensor-parallel size {tp_size} does not divide this model ({config.num_heads} attention heads, "
            f"{config.num_kv_heads} KV heads, intermediate size {config.intermediate_size}): "
            f"sizes that work are {', '.join(map(str, sizes))}"
        )


def _convert(config: Any, generation_eos: tuple[int, ...] | None) -> ModelConfig:
    from worker.models.registry import SUPPORTED_ARCHITECTURES

    if config.model_type not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"model type {config.model_type!r} is not supported: supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError("quantized checkpoints are not supported: use one in float32, bfloat16 or float16")
    if config.hidden_act not in ("silu", "swish"):
        raise ModelError(f"activation {config.hidden_act!r} is not supported: supported is silu")
    _check_numbers(config)
    dtype = config.dtype if config.dtype is not None else torch.float32
    return ModelConfig(
        architecture=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        tie_word_embeddings=config.tie_word_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope=_convert_rope(config),
        max_position_embeddings=config.max_position_embeddings,
        sliding_window=getattr(config, "sliding_window", None),
        attention_bias=getattr(config, "attention_bias", False),
        mlp_bias=getattr(config, "mlp_bias", False),
        eos_token_ids=generation_eos or _as_ids(config.eos_token_id),
        dtype=dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype),
    )


def _check_numbers(config: Any) -> None:
    """Raises ModelError for sizes that are none: what they would break later says less."""
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
              "max_position_embeddings")  # fmt: skip
    optional = ("num_key_value_heads", "head_dim", "sliding_window")
    for name in needed + optional:
        value = getattr(config, name, None)
        if not (name in optional and value is None) and (type(value) is not int or value < 1):
            raise ModelError(f"config.json: {name} must be a number of at least 1, not {value!r}")
    if not isinstance(config.rms_norm_eps, (int, float)):
        raise ModelError(f"config.json: rms_norm_eps must be a number, not {config.rms_norm_eps!r}")


def _convert_rope(config: Any) -> RopeConfig:
    params = dict(config.rope_parameters or {})
    rope_type = params.pop("rope_type", None) or params.pop("type", "default")
    params.pop("type", None)
    theta = params.pop("rope_theta", None) or 10_000.0
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"rope type {rope_type!r} is not supported: supported are {', '.join(ROPE_TYPES)}")
    if (params.pop("partial_rotary_factor", None) or 1.0) != 1.0:
        raise ModelError(
            "partial_rotary_factor other than 1 is not supported: every supported family rotates whole heads"
        )
    needed = {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor", "original_max_position_embeddings"),
    }[rope_type]
    missing = [name for name in needed if name not in params]
    if missing:
        raise ModelError(f"rope type {rope_type!r} lacks {', '.join(missing)} in config.json")
    return RopeConfig(rope_type, float(theta), params)


def _generation_eos(path: Path) -> tuple[int, ...] | None:
    try:
        values = json.loads((path / "generation_config.json").read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path / 'generation_config.json'}: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"cannot read {path / 'generation_config.json'}: it is not a JSON object")
    return _as_ids(values.get("eos_token_id"))


def _as_ids(value: Any) -> tuple[int, ...]:
    ids = tuple(value) if isinstance(value, (list, tuple)) else () if value is None else (value,)
    for token in ids:
        if type(token) is not int or not 0 <= token < 2**31:
            raise ModelError(f"eos_token_id: {token!r} is not a token id")
    return ids
