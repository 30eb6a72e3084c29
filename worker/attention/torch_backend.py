"""Attention in plain torch: the reference for every other backend, and what runs on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from worker.attention.base import AttentionBackend
from worker.batch import Batch

# Bytes of K plus V gathered at a time for decodes: small enough to stay in a core's L2 cache until attention reads it.
GATHER_BYTES = 2 << 20


@dataclass(slots=True)
class _DecodeGroup:
    """Decode entries attended together, `width` pages each.

    entries   [n] int64: which ones; None: all of the step's
    pages     [n * width] ids
    mask      [n, 1, 1, width * page_size]: 0, and -inf at padding
    padding   int64: where that is, in all tokens of the group
    """

    entries: torch.Tensor | None
    pages: torch.Tensor
    width: int
    mask: torch.Tensor
    padding: torch.Tensor


@dataclass(slots=True)
class _PrefillEntry:
    """One prefill entry: its tokens `start .. stop`, `length` keys on `pages`; mask None: no key before its tokens."""

    start: int
    stop: int
    length: int
    pages: torch.Tensor
    mask: torch.Tensor | None


class TorchAttention(AttentionBackend):
    """Gathers each row's pages into a buffer that is kept between steps, then runs scaled_dot_product_attention.

    Decode entries are sorted by length and gathered in groups of at most `GATHER_BYTES`, padded to the group's
    longest; all query heads that share a KV head form one block of queries, so K and V are read once. Prefill entries
    run one by one. Any page size, pool layout, head count and mix of entries.
    """

    def __init__(self) -> None:
        self._scratch = torch.empty(0)
        self._decodes: list[_DecodeGroup] = []
        self._prefills: list[_PrefillEntry] = []

    def prepare(self, batch: Batch) -> None:
        pool, page_size = self.pool, self.page_table.page_size
        page_elements = pool.k_cache(0)[0].numel()
        max_pages = max(1, GATHER_BYTES // (2 * page_elements * pool.dtype.itemsize))
        lengths = np.asarray(batch.host_device_len)
        counts = -(-lengths // page_size)
        self._decodes = self._decode_groups(batch, lengths, counts, max_pages)
        self._prefills = self._prefill_entries(batch, lengths, counts)
        largest = max(
            [len(group.pages) for group in self._decodes] + [len(entry.pages) for entry in self._prefills], default=0
        )
        if self._scratch.numel() < 2 * largest * page_elements or self._scratch.dtype != pool.dtype:
            self._scratch = torch.empty(2 * largest * page_elements, dtype=pool.dtype, device=pool.device)

    def forward(self, q: torch.Tensor, layer_id: int, batch: Batch) -> torch.Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        num_heads, head_dim = q.shape[1:]
        num_kv_heads = self.pool.k_cache(layer_id).shape[2]
        for group in self._decodes:
            k, v = self._gather(layer_id, group.pages, len(group.mask), group.padding)
            queries = q[: batch.num_decode] if group.entries is None else q.index_select(0, group.entries)
            queries = queries.view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
            result = F.scaled_dot_product_attention(queries, k, v, attn_mask=group.mask).reshape(
                -1, num_heads, head_dim
            )
            if group.entries is None:
                out[: batch.num_decode] = result
            else:
                out.index_copy_(0, group.entries, result)
        for entry in self._prefills:
            k, v = self._gather(layer_id, entry.pages, 1, None)
            k, v = k[:, :, : entry.length], v[:, :, : entry.length]
            queries = q[entry.start : entry.stop].transpose(0, 1)[None]
            result = F.scaled_dot_product_attention(
                queries, k, v, attn_mask=entry.mask, is_causal=entry.mask is None, enable_gqa=num_heads != num_kv_heads
            )
            out[entry.start : entry.stop] = result[0].transpose(0, 1)
        return out

    def _gather(
        self, layer_id: int, pages: torch.Tensor, rows: int, padding: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `pages` as views [rows, kv_heads, tokens, head_dim] of the scratch buffer.

        Zeros at `padding`: what a former owner of a page left there may be NaN, which no mask hides.
        """
        gathered = []
        for index, cache in enumerate((self.pool.k_cache(layer_id), self.pool.v_cache(layer_id))):
            count, page_shape = len(pages), cache.shape[1:]
            size = count * page_shape.numel()
            buffer = self._scratch[index * size : (index + 1) * size].view(count, *page_shape)
            torch.index_select(cache, 0, pages, out=buffer)
            if padding is not None:
                buffer.view(count * page_shape[0], -1).index_fill_(0, padding, 0.0)
            gathered.append(buffer.view(rows, -1, *page_shape[1:]).transpose(1, 2))
        return gathered[0], gathered[1]

    def _decode_groups(
        self, batch: Batch, lengths: np.ndarray, counts: np.ndarray, max_pages: int
    ) -> list[_DecodeGroup]:
        order = np.argsort(-lengths[: batch.num_decode], kind="stable")
        groups, first = [], 0
        while first < len(order):
            width = int(counts[order[first]])
            entries = order[first : first + max(1, max_pages // width)]
            whole = len(entries) == batch.num_decode
            groups.append(self._decode_group(batch, lengths, np.sort(entries) if whole else entries, width, whole))
            first += len(entries)
        return groups

    def _decode_group(
        self, batch: Batch, lengths: np.ndarray, entries: np.ndarray, width: int, whole: bool
    ) -> _DecodeGroup:
        device, page_size = self.pool.device, self.page_table.page_size
        index = torch.from_numpy(entries).to(device)
        length = torch.from_numpy(lengths[entries].astype(np.int64)).to(device)[:, None]
        pages = self._pages(batch.rows[index][:, None], width, (length - 1) // page_size)
        mask = torch.zeros(len(entries), width * page_size, dtype=self.pool.dtype, device=device)
        beyond = np.arange(width * page_size) >= lengths[entries][:, None]
        padding = torch.from_numpy(np.flatnonzero(beyond)).to(device)
        mask.view(-1).index_fill_(0, padding, float("-inf"))
        return _DecodeGroup(None if whole else index, pages.reshape(-1), width, mask[:, None, None, :], padding)

    def _prefill_entries(self, batch: Batch, lengths: np.ndarray, counts: np.ndarray) -> list[_PrefillEntry]:
        device = self.pool.device
        cached = np.asarray(batch.host_cached_len)
        entries, start = [], batch.num_decode
        for index in range(batch.num_decode, len(lengths)):
            length, first = int(lengths[index]), int(cached[index])
            extend = length - first
            mask = None
            if first > 0:
                mask = torch.ones(extend, length, dtype=torch.bool, device=device).tril_(first)
            pages = self._pages(batch.rows[index], int(counts[index]), None)
            entries.append(_PrefillEntry(start, start + extend, length, pages, mask))
            start += extend
        return entries

    def _pages(self, rows: torch.Tensor, width: int, last: torch.Tensor | None) -> torch.Tensor:
        """Page ids of each row's first `width` pages, never past its page `last`."""
        page_size = self.page_table.page_size
        page = torch.arange(width, device=self.pool.device)
        if last is not None:
            page = torch.minimum(page, last)
        return torch.div(self.page_table.slots(rows, page * page_size), page_size, rounding_mode="floor")
