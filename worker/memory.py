"""How much memory a rank has for KV pages."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from worker.config import WorkerConfig
from worker.device import Device
from worker.errors import ModelError
from worker.graphs import GraphSizes
from worker.model_config import ModelConfig

CONTEXT_BYTES = 1 << 30
"""What a process holds on a card outside torch's allocator: CUDA context, NCCL and library workspaces."""
LIBRARY_BYTES = 64 << 20
"""What the CPU's libraries take at their first use."""
GRAPH_BYTES = 16 << 20
"""What one captured size holds beyond the memory that all graphs share."""


def await_predecessor(device: Device, share: float, timeout: float = 5.0) -> None:
    """At a restart: wait until `share` of the card is free, but no longer than `timeout` seconds. The rank that was
    here before may still be giving its memory back: of another node's process nobody knows when it is gone."""
    deadline = time.monotonic() + timeout
    free, total = device.memory()
    while free < share * total and time.monotonic() < deadline:
        time.sleep(0.02)
        free, total = device.memory()


def cpu_room(device: Device, config: WorkerConfig, needed: int) -> int:
    """Bytes for KV pages on the CPU: a share of what is available now beyond the `needed` bytes of each rank, divided
    among the machine's ranks.

    With configured `num_pages` all that is available counts: the user has chosen.
    """
    available, _ = device.memory()
    share = config.cpu_memory_share if config.num_pages is None else 1.0
    return int((available - needed * config.local_ranks) * share) // config.local_ranks


def cpu_bytes(model: ModelConfig, config: WorkerConfig, max_seq_len: int, dtype: torch.dtype) -> int:
    """Estimate, on the safe side, of what a rank on the CPU takes beside weights and KV pages: its tables of all rows,
    and the largest step. With SmolLM2, MiB estimated / measured: 8 rows and 2,048 tokens 201 / 151, 64 rows and 256
    tokens 316 / 317, 4 rows and 8,192 tokens 742 / 431."""
    rows, tp = config.max_running_requests, config.tp_size
    tokens = min(config.max_step_tokens, rows * max_seq_len)
    staging = 16 * 4  # the plan and what is derived from it
    prefill_mask = 5 * min(tokens, max_seq_len) * max_seq_len
    sampling = 80 * min(rows, tokens) * model.vocab_size // tp  # logits, noise, and with filters order keys
    tables = (rows + 1) * (max_seq_len + config.page_size) * 4 * 2
    return LIBRARY_BYTES + tables + tokens * (_activation_bytes(model, tp, dtype) + staging) + prefill_mask + sampling


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


def graph_bytes(sizes: GraphSizes, model: ModelConfig, tp_size: int, dtype: torch.dtype) -> int:
    """Estimate of what graphs will take: static logits and the sampler's copies of them, the activations of the largest
    step, and each graph's own."""
    logits = 4 * sizes.decode[-1] * 4 * model.vocab_size // tp_size
    tokens = max([size.tokens for size in sizes.mixed], default=0)
    graphs = len(sizes.decode) + len(sizes.mixed)
    return logits + tokens * _activation_bytes(model, tp_size, dtype) + graphs * GRAPH_BYTES


def _activation_bytes(model: ModelConfig, tp_size: int, dtype: torch.dtype) -> int:
    """Of a token on one rank, on the safe side."""
    attention = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim // tp_size
    return (6 * model.hidden_size + 3 * attention + 3 * model.intermediate_size // tp_size) * dtype.itemsize


def no_room(config: WorkerConfig, max_seq_len: int, page_bytes: int, room: int, needed: int) -> ModelError:
    """The pages do not fit into `room` bytes; `needed`: what is kept beside them, 0 if unknown."""
    beside = f" beside {needed / 2**20:.0f} MiB for rows and the largest step" if needed else ""
    return ModelError(
        f"no memory for {config.num_pages or 1} KV pages: {max(room, 0) / 2**20:.0f} MiB are left for them"
        f"{beside}, a page takes {page_bytes / 2**20:.2f} MiB and one more is needed for padding; use "
        f"fewer pages, a smaller max_step_tokens (now {config.max_step_tokens}), max_running_requests "
        f"({config.max_running_requests}) or max_seq_len ({max_seq_len}), more ranks, or a larger share "
        "of the memory"
    )
