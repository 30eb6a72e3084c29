"""Kernel tests run on a GPU, or without one on Triton's interpreter (slow, so with small shapes)."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton when a kernel is defined


@pytest.fixture(scope="session")
def device() -> torch.device:
    pytest.importorskip("triton", reason="triton is not installed")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def big(device: torch.device) -> bool:
    """Whether full-size shapes are affordable."""
    return device.type == "cuda"
