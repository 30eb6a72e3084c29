"""One private Ray for all tests that ask for it, and a tiny checkpoint with random weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes on a busy machine says nothing.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


# Read by Ray and inherited by all it starts. Ranks at Ray's nice 15 get next to nothing beside another test file, and
# Serve kills a proxy that is not ready within 5 s.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "60")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repetitions", type=int, help="of each failure in tests/chaos; default: a few")


@pytest.fixture(scope="session")
def private_ray() -> Iterator[None]:
    """Ray in this process, with more CPUs than the machine has: ranks of tiny models may share cores.

    Spare ranks come where a test wants them: to start them costs as much as to start the ranks.
    """
    import ray
    import torch

    from cluster import spare_ranks

    spare_ranks.DELAY = 3600.0
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=torch.cuda.device_count(),
        include_dashboard=False,
        object_store_memory=128 << 20,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with eight query and two KV heads: tensor-parallel sizes 1, 2, 4 and 8."""
    from tests.checkpoints import make_checkpoint

    return make_checkpoint("llama", tmp_path_factory.mktemp("tiny") / "llama")
