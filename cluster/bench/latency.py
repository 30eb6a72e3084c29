"""`raydix bench latency`: milliseconds per token of one request alone, next to reading weights and context once."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from cluster.bench.limits import BYTES, ModelCost, this_machine
from cluster.bench.throughput import generate
from cluster.bench.workload import Workload, uniform
from cluster.config import EngineConfig
from cluster.progress import Progress


def bench_latency(
    config: EngineConfig, context: int, output_len: int, seed: int, repeats: int, progress: Progress
) -> dict[str, Any]:
    """Time per token of a decode at batch 1, around `context` tokens: what `output_len` tokens take longer than one.

    Returns:
        Medians `ms_per_token`, `first_token_ms`; `workload`, `runs`, `limit` (None where unknown), `config`.
    """
    from cluster import LLM

    start = context - output_len // 2
    with LLM(**config.model_dump(exclude_unset=True), progress=progress) as llm:
        runs = []
        for run in range(repeats + 1):  # the first one warms up
            progress(f"run {run} of {repeats}" if run else "warming up", 0.0)
            prompts = [uniform(1, start, start, seed, llm.info.vocab_size, 2 * run + i).prompts for i in range(2)]
            first = generate(llm, Workload(prompts[0], [1]), 0.6)["elapsed_s"]
            whole = generate(llm, Workload(prompts[1], [output_len]), 0.6)["elapsed_s"]
            runs.append({"first_token_ms": first * 1e3, "ms_per_token": (whole - first) / (output_len - 1) * 1e3})
        effective, path = llm.config, Path(llm.info.model_path)
    runs = runs[1:]
    result = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return result | {
        "workload": {"kind": "latency", "context": context, "output_len": output_len, "seed": seed},
        "runs": runs,
        "limit": latency_limit(path, effective, context, result["ms_per_token"]),
        "config": effective.model_dump(mode="json"),
    }


def latency_limit(path: Path, config: EngineConfig, context: int, measured_ms: float) -> dict[str, Any] | None:
    """Milliseconds to read weights and K/V once, and how far the measured time is from it."""
    machine = this_machine(config.device, config.dtype, config.tp_size)
    if machine is None:
        return None
    cost = ModelCost.from_checkpoint(path)
    ideal = BYTES[config.dtype] * (cost.body + cost.head + cost.kv_width * context) / machine.bandwidth * 1e3
    return {"ms_per_token": ideal, "ratio": ideal / measured_ms, "source": machine.source}
