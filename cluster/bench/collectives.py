"""`raydix bench collectives`: what the ranks' meetings cost, alone: all-reduce by message size, and sampling.

Processes of its own, one a rank, without Ray: on CUDA over NCCL with a card each (calls captured in a graph, as in a
decode step), elsewhere over gloo.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from cluster.errors import EngineError
from worker.graphs.samplers import NOISY
from worker.model_config import ModelConfig, check_tp_size
from worker.parallel import TPGroup, init_tp_group
from worker.sampling import Sampler

CALLS = 20  # of one thing in a graph
ROUNDS = 7  # their median counts
TIMEOUT = 120.0  # seconds, of a collective


@dataclass(frozen=True)
class Case:
    """What is measured; `device`: "cuda" or "cpu"."""

    tp_size: int
    device: str
    dtype: str
    rows: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    num_layers: int


def bench_collectives(path: Path, tp_size: int, device: str, dtype: str, rows: list[int]) -> dict[str, Any]:
    """Measures with the shapes of the model at `path`.

    Returns:
        `rows`, for each number of entries in a step: `KiB` of one all-reduce; `nccl_us` (or `gloo_us`) and
        `symmetric_us` of one (None where symmetric memory is not used); `step_ms`, the faster one as often as a step
        has it (twice a layer); `sampler_us` with the vocabulary sharded, and `gathered_us` where every rank gathers all
        logits and samples from them. `case`.

    Raises:
        ModelError: the model does not divide among `tp_size` ranks.
        EngineError: a rank fails, for want of memory, say.
    """
    model = ModelConfig.from_pretrained(str(path))
    check_tp_size(model, tp_size)
    case = Case(tp_size, device, dtype, tuple(rows), model.hidden_size, model.vocab_size, model.num_layers)
    with tempfile.TemporaryDirectory() as place:
        results = torch.multiprocessing.get_context("spawn").SimpleQueue()
        try:
            torch.multiprocessing.spawn(_rank, (case, f"file://{place}/store", results), tp_size)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise EngineError(f"a rank failed: {str(error).strip().splitlines()[-1]}") from error
        found = results.get()
    return {"rows": found, "case": asdict(case)}


def _rank(rank: int, case: Case, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if case.device == "cuda" else torch.device("cpu")
    if case.device == "cuda":
        torch.cuda.set_device(device)
    tp = init_tp_group(rank, case.tp_size, device, store, TIMEOUT)
    try:
        with torch.inference_mode():
            found = _measure(case, tp, device)
    finally:
        tp.destroy()
    if rank == 0:
        results.put(found)


def _measure(case: Case, tp: TPGroup, device: torch.device) -> list[dict[str, Any]]:
    dtype = getattr(torch, case.dtype)
    name = "nccl_us" if device.type == "cuda" else "gloo_us"
    found = []
    for count in case.rows:
        message = torch.zeros(count, case.hidden_size, dtype=dtype, device=device)
        row = {"rows": count, "KiB": message.nbytes / 1024}
        row[name] = _microseconds(lambda message=message: tp.all_reduce(message), tp, device)
        found.append(row)
    tp.use_symmetric_memory(dtype, device)
    for row in found:
        buffer = tp.reduce_buffer(row["rows"], case.hidden_size)
        row["symmetric_us"] = None
        if buffer is not None:
            buffer.zero_()
            row["symmetric_us"] = _microseconds(lambda buffer=buffer: tp.all_reduce(buffer), tp, device)
        best = min(row[key] for key in (name, "symmetric_us") if row[key] is not None)
        row["step_ms"] = 2 * case.num_layers * best / 1e3
        row |= _sampling(case, row["rows"], tp, dtype, device)
    return found


def _sampling(case: Case, count: int, tp: TPGroup, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    local = -(-case.vocab_size // tp.size)
    generator = torch.Generator(device).manual_seed(tp.rank)
    logits = torch.randn(count, local, generator=generator, device=device).to(dtype)
    rows = torch.arange(count, device=device)
    sharded = Sampler(count, local * tp.size, local * tp.rank, tp, device)
    whole = Sampler(count, local * tp.size, 0, TPGroup.single(), device)
    for sampler in (sharded, whole):
        sampler.state.noise.fill_(1.0)
    return {
        "sampler_us": _microseconds(lambda: sharded.sample(logits, rows, rows, NOISY), tp, device),
        "gathered_us": _microseconds(
            lambda: whole.sample(tp.all_gather(logits, dim=1), rows, rows, NOISY), tp, device
        ),
    }  # fmt: skip


def _microseconds(call: Callable[[], object], tp: TPGroup, device: torch.device) -> float:
    """Of one call among many in a row, as this rank sees it; every rank measures at the same time. A median."""

    def calls() -> None:
        for _ in range(CALLS):
            call()

    calls()
    run, finish, runs = calls, lambda: None, 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        run, finish, runs = graph.replay, lambda: torch.cuda.synchronize(device), 10
        run()
    seconds = []
    for _ in range(ROUNDS):
        finish()
        tp.barrier()
        started = time.perf_counter()
        for _ in range(runs):
            run()
        finish()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) / (CALLS * runs) * 1e6
