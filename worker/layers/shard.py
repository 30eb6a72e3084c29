"""`Shard`: which part of which checkpoint tensor fills which part of a parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn


class Shard(NamedTuple):
    """`target` (a view into a parameter) takes `checkpoint[name][index]`; the whole tensor there has `full_shape`."""

    name: str
    target: torch.Tensor
    index: tuple[slice, ...]
    full_shape: tuple[int, ...]


@runtime_checkable
class Sharded(Protocol):
    """A module with parameters of its own."""

    def shards(self) -> Iterator[Shard]:
        """Its shards; names are relative to the module's parent, as merged projections hold several tensors."""
        ...

    def finalize(self) -> None:
        """Called once when the weights are in place: change them into the form that runs fastest."""
        ...


def new_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter that takes no gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


def split_evenly(size: int, parts: int, index: int) -> slice:
    """The `index`-th of `parts` equal ranges of 0 .. size; `size` divides (checked when the model is created)."""
    assert size % parts == 0, f"{size} does not divide by {parts}"
    return slice(size // parts * index, size // parts * (index + 1))
