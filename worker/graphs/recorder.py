"""`Recorder`: work on the compute stream becomes a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Recorder:
    """Captures graphs that share one memory pool: only one of them runs at a time. CUDA only."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of what `work` launches. It must have run before: kernels are compiled and loaded, and buffers made,
        on their first run."""
        # Not the `torch.cuda.graph` context: it empties caches and, in some versions, collects garbage each time.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        return graph
