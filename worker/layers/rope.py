"""Rotary position embedding: cos and sin as a function of the absolute position, for every supported scaling.

Formulas follow `transformers.modeling_rope_utils`, which cites the papers and the original implementations.
"""

from __future__ import annotations

import math

import torch

from worker.errors import ModelError
from worker.model_config import ROPE_TYPES, ModelConfig


def build_rope_table(config: ModelConfig, length: int, device: torch.device | str) -> torch.Tensor:
    """float32 [length, 2, head_dim // 2]: cos and sin of positions 0 .. length - 1, times the attention factor.

    Element i of a head rotates with element i + head_dim // 2.

    "dynamic" scaling depends on the sequence length. A cached key must not change when its sequence grows, so
    position p is rotated with the frequencies of a sequence of p + 1 tokens: exactly what a decode with a KV cache in
    `transformers` does, and independent of how a prompt was cut into chunks or shared.
    """
    positions = torch.arange(length, dtype=torch.float32)
    inv_freq, attention_factor = inverse_frequencies(config)
    angles = positions[:, None] * inv_freq
    if config.rope.rope_type == "dynamic" and length > config.max_position_embeddings:
        beyond = positions[config.max_position_embeddings :]
        angles[config.max_position_embeddings :] = beyond[:, None] * _dynamic_inv_freq(config, beyond + 1)
    table = torch.stack((angles.cos(), angles.sin()), dim=1) * attention_factor
    return table.to(device)


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """float32 [head_dim // 2] radians per position, and the factor that cos and sin are multiplied by."""
    rope, dim = config.rope, config.head_dim
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    match rope.rope_type:
        case "default" | "dynamic":
            return inv_freq, 1.0
        case "linear":
            return inv_freq / rope.params["factor"], 1.0
        case "llama3":
            return _llama3(config, inv_freq), 1.0
        case "yarn":
            return _yarn(config, inv_freq)
    raise ModelError(f"rope type {rope.rope_type!r} is not supported: supported are {', '.join(ROPE_TYPES)}")


def _dynamic_inv_freq(config: ModelConfig, seq_len: torch.Tensor) -> torch.Tensor:
    """[n, head_dim // 2] frequencies for n sequence lengths beyond the original one: the base grows with the length."""
    dim, factor = config.head_dim, config.rope.params["factor"]
    stretch = factor * seq_len / config.max_position_embeddings - (factor - 1)
    base = config.rope.theta * stretch ** (dim / (dim - 2))
    return 1.0 / (base[:, None] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _llama3(config: ModelConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    params = config.rope.params
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    # Rotations that a frequency completes within the original context; the smooth factor is 0 at `low`, 1 at `high`.
    rotations = params["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    smooth = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / params["factor"] + smooth * inv_freq


def _yarn(config: ModelConfig, inv_freq: torch.Tensor) -> tuple[torch.Tensor, float]:
    """A ramp over the dimensions from the original frequencies to those divided by the factor."""
    params, dim = config.rope.params, config.head_dim
    original = params["original_max_position_embeddings"]
    factor = params["factor"] or config.max_position_embeddings / original

    def dimension(rotations: float) -> float:
        """The dimension whose frequency completes this many rotations within the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.rope.theta))

    low = dimension(params.get("beta_fast") or 32)
    high = dimension(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    scaled = inv_freq / factor * ramp + inv_freq * (1 - ramp)
    return scaled, _yarn_attention_factor(params, factor)


def _yarn_attention_factor(params: dict, factor: float) -> float:
    if params.get("attention_factor") is not None:
        return params["attention_factor"]

    def mscale(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(factor, params["mscale"]) / mscale(factor, params["mscale_all_dim"])
    return mscale(factor, 1.0)
