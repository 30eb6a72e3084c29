"""`run_ranks`: tensor-parallel ranks as threads of one process, for unit tests of code that meets in collectives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch


class ThreadGroup:
    """The interface of `worker.parallel.TPGroup` over a list that the ranks' threads share."""

    def __init__(self, rank: int, size: int, barrier: Barrier, board: list[Any]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._board = barrier, board

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._board[self.rank] = tensor.clone()
        self._barrier.wait(timeout=60)
        parts = list(self._board)
        self._barrier.wait(timeout=60)
        return parts

    def use_symmetric_memory(self, dtype: torch.dtype, device: torch.device) -> None:
        pass

    def reduce_buffer(self, rows: int, columns: int) -> None:
        return None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(sum(self._exchange(tensor))) if self.size > 1 else tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return torch.cat(self._exchange(tensor), dim) if self.size > 1 else tensor

    def barrier(self) -> None:
        self._barrier.wait(timeout=60)


def run_ranks(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """`work(group)` on every rank at once; the results in rank order. A rank's error breaks the others' waits."""
    barrier, board = Barrier(size), [None] * size

    def run(rank: int) -> Any:
        try:
            return work(ThreadGroup(rank, size, barrier, board))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
