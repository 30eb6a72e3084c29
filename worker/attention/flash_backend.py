"""Attention on CUDA with FlashAttention-4 for large prefills; decodes and small prefills run our Triton kernels."""

from __future__ import annotations

import numpy as np
import torch

from worker.attention.triton_backend import TritonAttention
from worker.batch import Batch
from worker.errors import ModelError
from worker.kernels.flash_prefill import MAX_ENTRIES, MIN_FLOPS, FlashPrefill


class FlashAttention(TritonAttention):
    """Like `TritonAttention` until FlashAttention-4 is loaded.

    Args:
        required: it is loaded beside everything else of the start, and `finish_compiling` waits for it. Otherwise only
            a kernel that has to be compiled is waited for; one in the disk cache is loaded when all else is done, so
            that the rank is ready the sooner.
    """

    def __init__(self, required: bool) -> None:
        super().__init__()
        self._required = required
        self._flash = FlashPrefill()
        if required:
            self._flash.start()
        self._pages: torch.Tensor | None = None  # of this step's prefill entries; None: not this step
        self._cu_extend: torch.Tensor | None = None

    def compile(self, num_heads: int) -> None:
        self._num_heads = num_heads
        self._flash.compile(num_heads, self.pool.k_cache(0), self.pool.v_cache(0))
        if not self._flash.started and not self._flash.compiled_before():
            self._flash.start()

    def finish_compiling(self) -> None:
        if not self._flash.started:
            self._flash.start()
            return
        self._flash.wait()
        if self._required and self._flash.error is not None:
            raise ModelError(f"FlashAttention-4 cannot be used: {self._flash.error}; use attention_backend triton")

    def prepare(self, batch: Batch) -> None:
        self._pages = None
        first = batch.num_decode
        entries = len(batch.rows) - first
        if batch.tiles is not None or not self._flash.ready or not 0 < entries <= MAX_ENTRIES:
            return
        if self._flops(batch.host_cached_len[first:], batch.host_device_len[first:]) < MIN_FLOPS:
            return
        page_size = self.page_table.page_size
        width = -(-batch.max_prefill_len // page_size)
        starts = self.page_table.page_starts[batch.rows[first:].long(), :width]
        self._pages = torch.div(starts, page_size, rounding_mode="floor")
        self._cu_extend = batch.cu_extend[first:] - batch.cu_extend[first]

    def prefill(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if self._pages is None:
            return super().prefill(q, k_cache, v_cache, batch, out)
        first = batch.num_decode
        attended = self._flash(
            q[first:], k_cache, v_cache, self._pages, self._cu_extend, batch.device_len[first:],
            batch.max_extend_len, batch.max_prefill_len,
        )  # fmt: skip
        if out is None:
            return attended
        out[first:] = attended
        return out

    def _flops(self, cached_len: np.ndarray, device_len: np.ndarray) -> float:
        """Of attention in one layer over entries of these lengths, the causal half not subtracted."""
        lengths = np.asarray(device_len, dtype=np.int64)
        return 4.0 * self._num_heads * self.pool.k_cache(0).shape[3] * float((lengths - cached_len) @ lengths)
