"""`ModelContext`: what every layer of a model shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from worker.attention.base import AttentionBackend
from worker.layers.ops import LayerOps
from worker.parallel import TPGroup

if TYPE_CHECKING:
    from kvcache.pool import BaseKVCachePool
    from worker.page_table import PageTable


@dataclass
class ModelContext:
    """The rank's group, attention backend, operations and pool.

    `max_seq_len` bounds the rope table (None: the model's limit). The pool is known only once the weights have taken
    their memory: `attach` it before the first forward pass.
    """

    tp: TPGroup
    attention: AttentionBackend
    dtype: torch.dtype
    device: torch.device
    max_seq_len: int | None = None
    ops: LayerOps = field(default_factory=LayerOps)
    pool: BaseKVCachePool | None = None

    def attach(self, pool: BaseKVCachePool, page_table: PageTable) -> None:
        """Store K/V in `pool` and attend through `page_table` from now on."""
        self.pool = pool
        self.attention.attach(pool, page_table)
