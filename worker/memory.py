"""How much memory a rank has for KV pages."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.config import WorkerConfig
from worker.device import Device

CONTEXT_BYTES = 1 << 30
"""What a process holds on a card outside torch's allocator: CUDA context, NCCL and library workspaces."""
GRAPH_BYTES = 16 << 20
"""What one captured batch size holds beyond the memory that all graphs share."""


def cpu_room(device: Device, config: WorkerConfig) -> int:
    """Bytes for KV pages on the CPU: a share of what is available now, divided among the machine's ranks.

    With configured `num_pages` all that is available counts: the user has chosen.
    """
    available, _ = device.memory()
    share = config.cpu_memory_share if config.num_pages is None else 1.0
    return int(available * share) // config.local_ranks


def cuda_room(device: Device, config: WorkerConfig, run_largest_step: Callable[[], None]) -> int:
    """Bytes for KV pages and graphs on a card: this rank's share of it, less the weights and the largest step.

    `run_largest_step` runs that step to its end; the weights are on the card, the pool holds next to nothing.
    """
    place = device.torch_device
    run_largest_step()  # compiles and autotunes; the second run is the one to measure
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(place)
    run_largest_step()
    peak = torch.cuda.max_memory_reserved(place)
    torch.cuda.empty_cache()
    transient = peak - torch.cuda.memory_reserved(place)
    free, total = device.memory()
    share = int(total * config.memory_utilization) - CONTEXT_BYTES - peak
    return min(share, free - transient)


def graph_bytes(sizes: tuple[int, ...], local_vocab: int) -> int:
    """Estimate of what decode graphs will take: static logits, the sampler's copies of them, and each graph's own."""
    return 4 * max(sizes) * local_vocab * 4 + len(sizes) * GRAPH_BYTES
