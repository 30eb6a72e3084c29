"""What the machine allows: the time a workload takes if memory bandwidth and FLOPs were all that counts.

    prefill   FLOPs / peak                                   (weights are read once for many tokens)
    decode    max(FLOPs / peak, bytes / bandwidth)           (weights once a step, K/V of the whole context per token)

with the fewest possible steps: everything admitted at once, up to `max_running_requests`. Nothing reaches it; the
ratio to it says how much is left, and makes figures from different machines comparable.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.bench.workload import Workload

# From the makers' data sheets: (bytes/s, dense 16-bit FLOP/s). Names are matched as part of the device's name.
GPUS = {
    "H200": (4.8e12, 989e12),
    "H100 PCIe": (2.0e12, 756e12),
    "H100": (3.35e12, 989e12),
    "A100-SXM4-80GB": (2.039e12, 312e12),
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Machine:
    """Bandwidth in bytes/s and peak in FLOP/s of everything the ranks run on together; `source` says from where."""

    bandwidth: float
    peak: float
    source: str


@dataclass(frozen=True)
class ModelCost:
    """Sizes that decide what a token costs. `body` and `head` are parameter counts; `kv_width` is per token."""

    body: int
    head: int
    layers: int
    query_width: int
    kv_width: int

    @classmethod
    def from_checkpoint(cls, path: Path) -> ModelCost:
        """From config.json of a dense Llama-like model (Llama, Mistral, Qwen2, Qwen3)."""
        return cls.from_config(json.loads((path / "config.json").read_text()))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelCost:
        """The same from a parsed config.json."""
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        query, kv = heads * head_dim, config.get("num_key_value_heads", heads) * head_dim
        layer = hidden * (2 * query + 2 * kv) + 3 * hidden * config["intermediate_size"]
        return cls(layers * layer, config["vocab_size"] * hidden, layers, query, 2 * layers * kv)


def ideal_seconds(workload: Workload, cost: ModelCost, dtype: str, machine: Machine, max_running: int) -> float:
    """Seconds of the whole workload at the machine's limits."""
    lens = [(len(prompt), output) for prompt, output in zip(workload.prompts, workload.output_lens, strict=True)]
    attention = 4 * cost.layers * cost.query_width  # FLOPs per token and position it attends to
    prefill = sum(2 * cost.body * prompt + 2 * cost.head + attention * prompt * prompt / 2 for prompt, _ in lens)
    # the first token comes out of the prefill
    decoded = sum(max(output - 1, 0) for _, output in lens)
    context = sum(max(output - 1, 0) * (prompt + output / 2) for prompt, output in lens)
    steps = max(max(output - 1 for _, output in lens), -(-decoded // max_running))
    decode_flops = 2 * (cost.body + cost.head) * decoded + attention * context
    decode_bytes = BYTES[dtype] * ((cost.body + cost.head) * steps + cost.kv_width * context)
    return prefill / machine.peak + max(decode_flops / machine.peak, decode_bytes / machine.bandwidth)


def this_machine(device: str, dtype: str, ranks: int) -> Machine | None:
    """The machine's limits: measured on a CPU (all cores), from the data sheet on a known GPU, else None (fake too)."""
    import torch

    if device == "cpu":
        return measure_cpu(dtype)
    if device != "cuda" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    for known, (bandwidth, peak) in GPUS.items():
        if known in name:
            return Machine(ranks * bandwidth, ranks * peak, f"data sheet of {ranks} x {known}")
    return None


def measure_cpu(dtype: str) -> Machine:
    """Reads 256 MiB and multiplies matrices with all cores; the best of a few tries each."""
    import torch

    data = torch.ones(64 << 20, dtype=torch.float32)
    bandwidth = data.nbytes / best_of(5, lambda: data.sum())
    size = 1024
    left = torch.ones(size, size, dtype=getattr(torch, dtype))
    peak = 2 * size**3 / best_of(5, lambda: left @ left)
    return Machine(bandwidth, peak, f"measured on this CPU, {torch.get_num_threads()} threads")


def best_of(times: int, work: Any) -> float:
    """Seconds of the fastest of `times` calls, after one that does not count."""
    work()
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
