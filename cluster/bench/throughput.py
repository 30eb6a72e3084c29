"""`raydix bench throughput`: offline tokens per second, next to what the machine allows."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.bench.limits import ModelCost, ideal_seconds, this_machine
from cluster.bench.trace import trace_window
from cluster.bench.workload import Workload, uniform
from cluster.config import EngineConfig
from cluster.progress import Progress

if TYPE_CHECKING:
    from cluster import LLM

WARM_UP_TOKENS = 8
TRACE_AT = 0.4  # of the run: the prefills are over, most requests still run
TRACE_SECONDS = 0.5


def bench_throughput(
    config: EngineConfig,
    num_seqs: int,
    min_len: int,
    max_len: int,
    seed: int,
    temperature: float,
    repeats: int,
    progress: Progress,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Runs the uniform workload `repeats` times on one engine, and once more for a `trace` file if one is named.

    Returns:
        Medians over the runs (`elapsed_s`, `output_tokens_per_s`, `total_tokens_per_s`), `num_requests`,
        `cached_tokens` (of the median run's prompts), `workload`, `runs`, `limit` (None where unknown), `config`,
        `gpu_busy` (share of the traced window; None without one).
    """
    from cluster import LLM

    with LLM(**config.model_dump(exclude_unset=True), progress=progress) as llm:
        loads = [uniform(num_seqs, min_len, max_len, seed, llm.info.vocab_size, run) for run in range(repeats)]
        progress("warming up", 0.0)
        generate(llm, Workload([loads[0].prompts[0][::-1]], [WARM_UP_TOKENS]), temperature)
        runs = []
        for number, load in enumerate(loads):
            progress(f"run {number + 1} of {repeats}", 0.0)
            runs.append(generate(llm, load, temperature))
        busy = None
        if trace is not None:
            progress("tracing", 0.0)
            again = uniform(num_seqs, min_len, max_len, seed, llm.info.vocab_size, repeats)
            after = runs[-1]["elapsed_s"] * TRACE_AT
            busy = trace_window(trace, lambda: generate(llm, again, temperature), after, TRACE_SECONDS)
        effective = llm.config
        path = Path(llm.info.model_path)
    result = summarise(runs, loads[0]) | {
        "num_requests": num_seqs,
        "gpu_busy": busy,
        "workload": {"kind": "uniform", "num_seqs": num_seqs, "min_len": min_len, "max_len": max_len, "seed": seed}
        | {
            "temperature": temperature,
            "prompt_tokens": loads[0].prompt_tokens,
            "output_tokens": loads[0].output_tokens,
        },
    }
    return result | {
        "limit": limit(loads[0], path, effective, result["elapsed_s"]),
        "config": effective.model_dump(mode="json"),
    }


def generate(llm: LLM, load: Workload, temperature: float) -> dict[str, float]:
    """One timed run."""
    from scheduler.sampling_params import SamplingParams

    sampling = [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=tokens, seed=number)
        for number, tokens in enumerate(load.output_lens)
    ]
    started = time.perf_counter()
    outputs = llm.generate(load.prompts, sampling)
    elapsed = time.perf_counter() - started
    produced = sum(len(output.token_ids) for output in outputs)
    if produced != load.output_tokens:
        raise RuntimeError(f"expected {load.output_tokens} output tokens, got {produced}: this run measures nothing")
    return {"elapsed_s": elapsed, "cached_tokens": sum(output.cached_tokens for output in outputs)}


def summarise(runs: list[dict[str, float]], load: Workload) -> dict[str, Any]:
    """Medians over the runs."""
    elapsed = statistics.median(run["elapsed_s"] for run in runs)
    return {
        "elapsed_s": elapsed,
        "output_tokens_per_s": load.output_tokens / elapsed,
        "total_tokens_per_s": (load.prompt_tokens + load.output_tokens) / elapsed,
        "cached_tokens": int(statistics.median_low(run["cached_tokens"] for run in runs)),
        "runs": runs,
    }


def limit(load: Workload, path: Path, config: EngineConfig, elapsed: float) -> dict[str, Any] | None:
    """Output tokens per second at the machine's limits, and our share of it."""
    machine = this_machine(config.device, config.dtype, config.tp_size)
    if machine is None:
        return None
    seconds = ideal_seconds(load, ModelCost.from_checkpoint(path), config.dtype, machine, config.max_running_requests)
    return {
        "output_tokens_per_s": load.output_tokens / seconds,
        "ratio": seconds / elapsed,
        "bandwidth_bytes_per_s": machine.bandwidth,
        "peak_flops": machine.peak,
        "source": machine.source,
    }
