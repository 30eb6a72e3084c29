"""Attention backends, by name."""

from __future__ import annotations

import torch

from worker.attention.base import AttentionBackend
from worker.attention.torch_backend import TorchAttention
from worker.errors import ModelError

__all__ = ["AttentionBackend", "TorchAttention", "create_attention_backend"]

BACKENDS = ("torch", "triton")


def create_attention_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """The backend called `name`; "auto" is the best one for `device`.

    Raises:
        ModelError: unknown name.
    """
    if name == "auto":
        name = "triton" if torch.device(device).type == "cuda" else "torch"
    if name not in BACKENDS:
        raise ModelError(f"attention backend {name!r} is unknown: known are auto, {', '.join(BACKENDS)}")
    if name == "triton":
        from worker.attention.triton_backend import TritonAttention  # triton comes with torch for CUDA only

        return TritonAttention()
    return TorchAttention()
