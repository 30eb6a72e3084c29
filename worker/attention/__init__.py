"""Attention backends, by name."""

from __future__ import annotations

import torch

from worker.attention.base import AttentionBackend
from worker.attention.torch_backend import TorchAttention
from worker.errors import ModelError

__all__ = ["AttentionBackend", "TorchAttention", "create_attention_backend"]

BACKENDS: dict[str, type[AttentionBackend]] = {"torch": TorchAttention}


def create_attention_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """The backend called `name`; "auto" is the best one for `device`.

    Raises:
        ModelError: unknown name.
    """
    if name == "auto":
        name = "torch"
    if name not in BACKENDS:
        raise ModelError(f"attention backend {name!r} is unknown: known are auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]()
