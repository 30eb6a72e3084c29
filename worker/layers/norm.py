"""RMS normalisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from worker.layers.shard import Shard, new_parameter


class RMSNorm(nn.Module):
    """The weight and epsilon of a norm over the last `size` elements; every rank holds all of it.

    The computation is in `LayerOps`, as it is fused with what stands before or after it.
    """

    def __init__(self, name: str, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.weight = new_parameter(size, dtype=dtype, device=device)

    def shards(self) -> Iterator[Shard]:
        yield Shard(f"{self.name}.weight", self.weight.data, (slice(None),), tuple(self.weight.shape))

    def finalize(self) -> None:
        pass
