"""All-reduce between cards: NCCL, and symmetric memory where the cards allow it, eager and in a CUDA graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from worker import symmetric_memory
from worker.parallel import TPGroup, init_tp_group

DTYPES = ("bfloat16", "float32", "float16")
# rows of 4,096 numbers: one-shot, one-shot's largest at two ranks in 16 bits, two-shot, larger than the buffer
ROWS = (1, 64, 256, 3000)
HIDDEN = 4096


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_sums_are_right(tp_size: int, dtype: str, tmp_path: Path) -> None:
    have = torch.cuda.device_count()
    if have < tp_size:
        pytest.skip(f"needs {tp_size} CUDA devices, this machine has {have}")
    torch.multiprocessing.spawn(rank_main, (tp_size, dtype, f"file://{tmp_path}/store"), tp_size)


def rank_main(rank: int, tp_size: int, dtype: str, store: str) -> None:
    """One rank; raises where a sum is wrong."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    tp = init_tp_group(rank, tp_size, device, store, 60.0)
    try:
        with torch.inference_mode():
            tp.use_symmetric_memory(getattr(torch, dtype), device)
            for rows in ROWS:
                check(tp, rows, getattr(torch, dtype), device)
    finally:
        tp.destroy()


def check(tp: TPGroup, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """The sum of every rank's numbers, small integers, so that it is exact in each type."""
    numbers = (torch.arange(rows * HIDDEN, device=device) % 13).view(rows, HIDDEN).to(dtype)
    expected = numbers * tp.size + tp.size * (tp.size - 1) // 2
    buffer = tp.reduce_buffer(rows, HIDDEN)
    fits = rows * HIDDEN * dtype.itemsize <= symmetric_memory.MAX_BYTES and dtype != torch.float16
    assert (buffer is not None) == fits
    if buffer is None:
        buffer = torch.empty_like(numbers)

    def reduce_once() -> torch.Tensor:
        torch.add(numbers, tp.rank, out=buffer)
        return tp.all_reduce(buffer).clone()

    assert torch.equal(reduce_once(), expected)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = reduce_once(), reduce_once()
    for _ in range(5):
        first.zero_(), second.zero_()
        graph.replay()
        assert torch.equal(first, expected) and torch.equal(second, expected)
