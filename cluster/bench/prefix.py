"""`raydix bench prefix`: time until every request of a burst has its first token, with and without a shared prefix."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from cluster.bench.limits import ModelCost, this_machine
from cluster.bench.workload import MAX_TOKEN_ID
from cluster.config import EngineConfig
from cluster.progress import Progress


def bench_prefix(
    config: EngineConfig, num_seqs: int, prefix_len: int, own_len: int, seed: int, progress: Progress
) -> dict[str, Any]:
    """Four bursts of `num_seqs` requests of one output token each, in this order, on one engine:

    cold              a prefix that nobody has seen, shared by all, and own tokens behind it
    again             the same prompts
    new own tokens    the same prefix, other own tokens
    nothing shared    prompts of the same length without anything in common

    Returns:
        `bursts`: rows of burst, `first_tokens_ms` (of all requests), `computed_tokens`, `limit_ms` and `ratio` (None
        where the machine is unknown); `workload`, `config`.
    """
    from cluster import LLM

    with LLM(**config.model_dump(exclude_unset=True), progress=progress) as llm:
        top = min(MAX_TOKEN_ID, llm.info.vocab_size - 1)
        rng = random.Random(seed)

        def ids(count: int) -> list[int]:
            return [rng.randint(0, top) for _ in range(count)]

        progress("warming up", 0.0)
        for _ in range(2):  # a burst of the same shape: kernels, libraries and allocator have met it
            shared = ids(prefix_len)
            first_tokens(llm, [shared + ids(own_len) for _ in range(num_seqs)])
        shared = ids(prefix_len)
        prompts = [shared + ids(own_len) for _ in range(num_seqs)]
        others = [shared + ids(own_len) for _ in range(num_seqs)]
        distinct = [ids(prefix_len + own_len) for _ in range(num_seqs)]
        bursts = {"cold": prompts, "again": prompts, "new own tokens": others, "nothing shared": distinct}
        rows = []
        for name, burst in bursts.items():
            progress(name, 0.0)
            rows.append({"burst": name, **first_tokens(llm, burst)})
        effective, path = llm.config, Path(llm.info.model_path)
    add_limits(rows, path, effective, num_seqs, prefix_len + own_len)
    return {
        "bursts": rows,
        "workload": {"num_seqs": num_seqs, "prefix_len": prefix_len, "own_len": own_len, "seed": seed},
        "config": effective.model_dump(mode="json"),
    }


def first_tokens(llm: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Seconds until all have one token, and the prompt tokens that had to be computed."""
    from scheduler.sampling_params import SamplingParams

    started = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    elapsed = time.perf_counter() - started
    computed = sum(map(len, prompts)) - sum(output.cached_tokens for output in outputs)
    return {"first_tokens_ms": elapsed * 1e3, "computed_tokens": computed}


def add_limits(rows: list[dict[str, Any]], path: Path, config: EngineConfig, num_seqs: int, length: int) -> None:
    """Adds `limit_ms` and `ratio`: the FLOPs of the computed tokens, spread evenly over the requests' ends."""
    machine = this_machine(config.device, config.dtype, config.tp_size)
    cost = ModelCost.from_checkpoint(path)
    for row in rows:
        row["limit_ms"] = row["ratio"] = None
        if machine is None:
            continue
        fresh = row["computed_tokens"] / num_seqs
        attended = row["computed_tokens"] * (length - fresh / 2)
        flops = 2 * cost.body * row["computed_tokens"] + 2 * cost.head * num_seqs
        flops += 4 * cost.layers * cost.query_width * attended
        row["limit_ms"] = flops / machine.peak * 1e3
        row["ratio"] = row["limit_ms"] / row["first_tokens_ms"]
