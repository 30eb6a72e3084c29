"""Kernel tests run on a GPU, or without one on Triton's interpreter (slow, so with small shapes)."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton when a kernel is defined

# More threads than cores are many times slower than one.
torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


@pytest.fixture(scope="session")
def device() -> torch.device:
    pytest.importorskip("triton", reason="triton is not installed")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def big(device: torch.device) -> bool:
    """Whether full-size shapes are affordable."""
    return device.type == "cuda"
