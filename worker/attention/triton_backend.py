"""Attention on CUDA with our Triton kernels: split-KV decode for decode rows, a causal paged kernel for the rest."""

from __future__ import annotations

import torch

from worker.attention.base import AttentionBackend
from worker.batch import Batch
from worker.errors import ModelError
from worker.kernels.decode_attention import DecodeAttention
from worker.kernels.prefill_attention import prefill_attention
from worker.kernels.tiled_prefill import TiledPrefill

MAX_HEAD_DIM = 256


class TritonAttention(AttentionBackend):
    """Any page size and pool layout, head_dim up to 256. Decodes, and prefills in tiles, can be captured.

    Raises:
        ModelError: from `forward`, for a head size without a kernel.
    """

    def __init__(self) -> None:
        self._decode: DecodeAttention | None = None
        self._tiled: TiledPrefill | None = None

    def prepare(self, batch: Batch) -> None:
        pass  # the kernels read the step's own arrays

    def forward(self, q: torch.Tensor, layer_id: int, batch: Batch) -> torch.Tensor:
        k_cache, v_cache = self.pool.k_cache(layer_id), self.pool.v_cache(layer_id)
        decodes = batch.num_decode
        if not decodes:
            return self.prefill(q, k_cache, v_cache, batch)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        decode = self._decode or self._create_decode(q, k_cache)
        decode(
            q[:decodes], k_cache, v_cache, out[:decodes], self.page_table.page_starts,
            batch.rows[:decodes], batch.device_len[:decodes],
        )  # fmt: skip
        if decodes < len(batch.rows):
            self.prefill(q, k_cache, v_cache, batch, out)
        return out

    def prefill(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend the entries after the decodes: writes their tokens into `out` [T, local_heads, head_dim], a new one if
        none is given, and returns it."""
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        first = batch.num_decode
        arguments = (
            q, k_cache, v_cache, out, self.page_table.page_starts, batch.rows[first:], batch.cached_len[first:],
            batch.device_len[first:], batch.cu_extend[first:],
        )  # fmt: skip
        if batch.tiles is None:
            return prefill_attention(*arguments, batch.max_extend_len)
        if self._tiled is None:
            self._tiled = TiledPrefill(q.shape[1], k_cache.shape[2], q.shape[2], q.dtype, q.device)
        return self._tiled(*arguments, batch.tiles)

    def _create_decode(self, q: torch.Tensor, k_cache: torch.Tensor) -> DecodeAttention:
        _, num_heads, head_dim = q.shape
        _, page_size, num_kv_heads, _ = k_cache.shape
        if head_dim > MAX_HEAD_DIM:
            raise ModelError(
                f"head_dim {head_dim} has no attention kernel, the largest is {MAX_HEAD_DIM}: use backend torch"
            )
        most = self.page_table.dummy_row  # the table's rows for requests
        self._decode = DecodeAttention(num_heads, num_kv_heads, head_dim, page_size, most, q.device)
        return self._decode
