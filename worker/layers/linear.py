"""Linear layers split over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from worker.layers.gemm import Gemm
from worker.layers.shard import Shard, new_parameter, split_evenly
from worker.parallel import TPGroup


class Part(NamedTuple):
    """One projection of the checkpoint within a column-parallel layer: this rank holds its output rows `rows`."""

    name: str
    out_features: int
    rows: slice


class _Linear(nn.Module):
    """A local weight [rows, columns], and a bias that the product adds unless `bias_after`."""

    def __init__(
        self, rows: int, columns: int, bias: bool, dtype: torch.dtype, device: torch.device, bias_after: bool = False
    ) -> None:
        super().__init__()
        self.weight = new_parameter(rows, columns, dtype=dtype, device=device)
        self.bias = new_parameter(rows, dtype=dtype, device=device) if bias else None
        self.gemm = Gemm(self.weight, None if bias_after else self.bias)

    def finalize(self) -> None:
        if self.gemm.pack():
            self.weight = self.gemm.weight = None


class ColumnParallelLinear(_Linear):
    """Projections of the same input in one product; each rank computes its output rows of every part.

    Output: [..., sum of the parts' local rows], part after part. No communication.
    """

    def __init__(
        self, in_features: int, parts: list[Part], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(sum(part.rows.stop - part.rows.start for part in parts), in_features, bias, dtype, device)
        self.in_features = in_features
        self.parts = parts

    def shards(self) -> Iterator[Shard]:
        start = 0
        for name, out_features, rows in self.parts:
            stop = start + rows.stop - rows.start
            full = (out_features, self.in_features)
            yield Shard(f"{name}.weight", self.weight[start:stop], (rows, slice(None)), full)
            if self.bias is not None:
                yield Shard(f"{name}.bias", self.bias[start:stop], (rows,), full[:1])
            start = stop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gemm(x)


class RowParallelLinear(_Linear):
    """One projection whose input features are split evenly; the ranks' partial sums meet in an all-reduce.

    The bias is added once, after the all-reduce (with one rank, inside the product).
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        columns = split_evenly(in_features, tp.size, tp.rank)
        super().__init__(out_features, columns.stop - columns.start, bias, dtype, device, bias_after=tp.size > 1)
        self.name = name
        self.columns = columns
        self.full_shape = (out_features, in_features)
        self.tp = tp

    def shards(self) -> Iterator[Shard]:
        yield Shard(f"{self.name}.weight", self.weight.data, (slice(None), self.columns), self.full_shape)
        if self.bias is not None:
            yield Shard(f"{self.name}.bias", self.bias.data, (slice(None),), self.full_shape[:1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return self.gemm(x)
        y = self.tp.all_reduce(self.gemm(x, self.tp.reduce_buffer(x.shape[0], self.full_shape[0])))
        if self.bias is not None:
            y += self.bias
        return y
