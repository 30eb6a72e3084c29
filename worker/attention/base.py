"""The attention interface: what a model asks of a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from worker.batch import Batch

if TYPE_CHECKING:
    from kvcache.pool import BaseKVCachePool
    from worker.page_table import PageTable


class AttentionBackend(ABC):
    """Causal attention of a step's queries over each row's tokens, read from the paged pool.

    The layer stores the step's own K/V in the pool before it calls `forward`, so a row's keys are the slots of
    positions 0 .. device_len - 1, and query i of an entry sees positions up to its own. `attach` is called once the
    pool exists, `prepare` once per step, `forward` once per layer.
    """

    pool: BaseKVCachePool
    page_table: PageTable

    def attach(self, pool: BaseKVCachePool, page_table: PageTable) -> None:
        """Use `pool` and `page_table` from now on."""
        self.pool = pool
        self.page_table = page_table

    def compile(self, num_heads: int) -> None:  # noqa: B027 (most backends compile at their first call)
        """Begin to compile what steps will need, for `num_heads` local query heads; after `attach`, before the first
        request."""

    def finish_compiling(self) -> None:  # noqa: B027
        """The start is over: wait for what `compile` began and the backend cannot serve without. Raises ModelError."""

    @abstractmethod
    def prepare(self, batch: Batch) -> None:
        """Compute what all layers of the step share."""

    @abstractmethod
    def forward(self, q: torch.Tensor, layer_id: int, batch: Batch) -> torch.Tensor:
        """Attention output of the step's queries, scaled by head_dim ** -0.5.

        Args:
            q: [T, local_heads, head_dim], in batch order; may be a view whose last dimension alone is contiguous.

        Returns:
            [T, local_heads, head_dim], contiguous.
        """
