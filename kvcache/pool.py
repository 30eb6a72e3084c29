"""The physical pool: one rank's K/V of every layer, in pages. The only module of kvcache/ that needs torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from enum import Enum

import numpy as np
import torch

from kvcache.base import CacheError


class KVCacheLayout(Enum):
    """Order in memory. The logical shape, which all code sees, is the same for both."""

    LAYER_FIRST = "layer_first"
    """All pages of a layer together: K and V, layer, page. What attention reads."""
    PAGE_FIRST = "page_first"
    """All layers of a page together: K and V, page, layer. What moving whole pages wants."""


class BaseKVCachePool(ABC):
    """Where the workers of one rank keep K/V."""

    @property
    @abstractmethod
    def num_layers(self) -> int: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @abstractmethod
    def k_cache(self, layer_id: int) -> torch.Tensor:
        """Keys of a layer: a view [num_pages, page_size, local_kv_heads, head_dim], no copy."""

    @abstractmethod
    def v_cache(self, layer_id: int) -> torch.Tensor:
        """Values of a layer: a view [num_pages, page_size, local_kv_heads, head_dim], no copy."""

    @abstractmethod
    def store_kv(self, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor, layer_id: int) -> None:
        """Write K and V of T tokens into their slots.

        k, v: [T, local_kv_heads, head_dim] of the pool's dtype; out_loc: [T] slots, int64 (int32 is converted).
        Slots are distinct, but for padding rows, which may share the dummy page.
        """


class MHAKVCache(BaseKVCachePool):
    """K and V per head and token (multi-head and grouped-query attention).

    `kv_buffer` has the logical shape [2, num_layers, num_pages, page_size, local_kv_heads, head_dim], K first.
    `num_pages` is the total: usable pages and one dummy page for padding. The memory is zeroed, so that what an
    attention kernel reads and masks in a page not yet written is finite.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        local_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        layout: KVCacheLayout = KVCacheLayout.LAYER_FIRST,
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_pages": num_pages,
            "page_size": page_size,
            "local_kv_heads": local_kv_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise CacheError(f"{name} must be at least 1, got {size}")
        if num_pages * page_size > 2**31 - 1:
            raise CacheError(
                f"{num_pages} pages of {page_size} slots exceed the 2^31 - 1 slots that int32 can name; "
                f"use at most {(2**31 - 1) // page_size} pages"
            )
        page = (page_size, local_kv_heads, head_dim)
        if layout is KVCacheLayout.LAYER_FIRST:
            self.kv_buffer = _zeros((2, num_layers, num_pages, *page), dtype, device)
        else:
            paged = _zeros((2, num_pages, num_layers, *page), dtype, device)
            self.kv_buffer = paged.permute(0, 2, 1, 3, 4, 5)
        self.layout = layout
        self.page_size = page_size
        self._k_layers = self.kv_buffer[0].unbind(0)
        self._v_layers = self.kv_buffer[1].unbind(0)
        self._k_slots: list[torch.Tensor] = []  # by layer, [slots, local_kv_heads, head_dim]
        self._v_slots: list[torch.Tensor] = []
        if layout is KVCacheLayout.LAYER_FIRST:
            self._k_slots = [layer.flatten(0, 1) for layer in self._k_layers]
            self._v_slots = [layer.flatten(0, 1) for layer in self._v_layers]

    @property
    def num_layers(self) -> int:
        return self.kv_buffer.shape[1]

    @property
    def device(self) -> torch.device:
        return self.kv_buffer.device

    @property
    def dtype(self) -> torch.dtype:
        return self.kv_buffer.dtype

    def k_cache(self, layer_id: int) -> torch.Tensor:
        return self._k_layers[layer_id]

    def v_cache(self, layer_id: int) -> torch.Tensor:
        return self._v_layers[layer_id]

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor, layer_id: int) -> None:
        slots = out_loc.to(torch.int64)
        if self.layout is KVCacheLayout.LAYER_FIRST:
            self._k_slots[layer_id].index_copy_(0, slots, k)
            self._v_slots[layer_id].index_copy_(0, slots, v)
        else:
            # Slots of one layer are not evenly spaced here, so there is no flat view to index by slot.
            page = torch.div(slots, self.page_size, rounding_mode="floor")
            offset = slots - page * self.page_size
            self._k_layers[layer_id][page, offset] = k
            self._v_layers[layer_id][page, offset] = v


def local_kv_heads(num_kv_heads: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """How many KV heads a rank holds, and which is the first: ``(count, first_head)``.

    Heads are divided evenly. With more ranks than heads each rank holds one, and ``tp_size / num_kv_heads``
    neighbouring ranks hold the same: rank r holds head ``r * num_kv_heads // tp_size``.
    """
    if num_kv_heads < 1 or tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise CacheError(
            f"need num_kv_heads >= 1 and 0 <= tp_rank < tp_size, "
            f"got num_kv_heads {num_kv_heads}, tp_rank {tp_rank}, tp_size {tp_size}"
        )
    if max(num_kv_heads, tp_size) % min(num_kv_heads, tp_size):
        divisors = [str(size) for size in range(1, num_kv_heads + 1) if num_kv_heads % size == 0]
        raise CacheError(
            f"{num_kv_heads} KV heads cannot be shared out evenly over tp_size {tp_size}; "
            f"sizes that work: {', '.join(divisors)}, or a multiple of {num_kv_heads}"
        )
    return max(1, num_kv_heads // tp_size), tp_rank * num_kv_heads // tp_size


def create_kvcache_pool(
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    layout: KVCacheLayout = KVCacheLayout.LAYER_FIRST,
    tp_size: int = 1,
    tp_rank: int = 0,
) -> BaseKVCachePool:
    """The pool of rank `tp_rank` for a model with `num_kv_heads` KV heads in all; see `MHAKVCache`.

    `num_pages` is the total, with the dummy page. Raises `CacheError` when the heads do not divide over the ranks.
    """
    count, _ = local_kv_heads(num_kv_heads, tp_size, tp_rank)
    return MHAKVCache(num_layers, num_pages, page_size, count, head_dim, dtype, device, layout)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Zeros; on the CPU from the system's zero pages, so memory is taken when a page is first written, not here."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
