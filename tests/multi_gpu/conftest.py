"""Where the ranks run: on the CPU, several on one card, or one on each card. The skip says what is missing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Setting:
    """Engine settings of one variant, and the whole cards that `tp_size` ranks need."""

    name: str
    device: str
    gpus_per_rank: float | None

    def config(self, tp_size: int) -> dict[str, object]:
        if self.device == "cpu":
            return {"device": "cpu", "tp_size": tp_size}
        return {"device": "cuda", "tp_size": tp_size, "gpus_per_rank": self.gpus_per_rank or 1 / tp_size}

    def missing(self, tp_size: int) -> str | None:
        """Why this variant cannot run here, or None."""
        if self.device == "cpu":
            return None
        import torch

        have = torch.cuda.device_count()
        need = tp_size if self.gpus_per_rank == 1.0 else 1
        return None if have >= need else f"needs {need} CUDA device{'s' * (need > 1)}, this machine has {have}"


SETTINGS = [
    Setting("cpu-gloo", "cpu", None),
    Setting("one-gpu-gloo", "cuda", None),  # tp_size ranks share a card: NCCL refuses that, gloo does not
    Setting("gpus-nccl", "cuda", 1.0),
]


@pytest.fixture(params=SETTINGS, ids=lambda setting: setting.name)
def setting(request: pytest.FixtureRequest) -> Setting:
    return request.param
