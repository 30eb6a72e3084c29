"""Attention backends, by name."""

from __future__ import annotations

import torch

from worker.attention.base import AttentionBackend
from worker.attention.torch_backend import TorchAttention
from worker.errors import ModelError

__all__ = ["AttentionBackend", "TorchAttention", "create_attention_backend"]

BACKENDS = ("torch", "triton", "flash")


def create_attention_backend(
    name: str, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> AttentionBackend:
    """The backend called `name`; "auto" is the best one for `device` and `dtype`.

    "flash" waits at start-up until FlashAttention-4 is loaded; "auto" serves with the Triton kernel until it is.

    Raises:
        ModelError: unknown name, or "flash" where it cannot run.
    """
    device = torch.device(device)
    if name not in ("auto", *BACKENDS):
        raise ModelError(f"attention backend {name!r} is unknown: known are auto, {', '.join(BACKENDS)}")
    required = name == "flash"
    if name == "auto":
        name = "flash" if device.type == "cuda" else "torch"
    if name == "flash":
        from worker.kernels.flash_prefill import why_not

        reason = why_not(dtype, device)
        if reason is None:
            from worker.attention.flash_backend import FlashAttention

            return FlashAttention(required)
        if required:
            raise ModelError(f"attention backend flash cannot run: {reason}; use auto or triton")
        name = "triton"
    if name == "triton":
        from worker.attention.triton_backend import TritonAttention  # triton comes with torch for CUDA only

        return TritonAttention()
    return TorchAttention()
