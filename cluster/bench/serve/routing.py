"""`raydix bench router`: one load over several replicas under three policies: Ray's power of two, affinity, and ours.

Real Serve, schedulers, caches and HTTP; the engines are fake (`--device fake`) and take `fake_tokens_per_s` input
tokens a second, so that what a policy saves or wastes in prefill shows in the latencies. Each policy gets a deployment
of its own, with empty caches, and the same cases one after the other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.bench.serve.client import Endpoint
from cluster.bench.serve.generator import send, warm_up
from cluster.bench.serve.paths import TIMEOUT, free_port, machine, wait_until_ready
from cluster.bench.serve.report import summarise
from cluster.bench.serve.sessions import from_trace
from cluster.config import EngineConfig
from cluster.progress import Progress
from cluster.progress_bar import ProgressBar
from cluster.simulate.synthetic import Lengths, SyntheticSpec, synthetic_trace

POLICIES = {
    "power of two": {"router": "power_of_two"},
    "affinity": {"router": "cache_aware", "router_beta": 0.0},
    "cache-aware": {"router": "cache_aware"},
}
STOPPED, RUNNING = 0.4, 0.1  # seconds, alternating, of the slow replica's rank
KILL_AFTER = 6.0  # seconds from the start of the load
APP = "raydix"

Trouble = Callable[[list[dict[str, Any]]], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def no_trouble(replicas: list[dict[str, Any]]) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def slow_replica(replicas: list[dict[str, Any]]) -> AsyncIterator[None]:
    """The first replica's rank stands still most of the time."""
    pid = replicas[0]["info"]["ranks"][0]["pid"]

    async def hold() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(STOPPED)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(RUNNING)

    task = asyncio.create_task(hold())
    try:
        yield
    finally:
        task.cancel()
        os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def dead_replica(replicas: list[dict[str, Any]]) -> AsyncIterator[None]:
    """The first replica's process is killed under load."""
    kill = asyncio.get_running_loop().call_later(KILL_AFTER, os.kill, replicas[0]["info"]["driver_pid"], signal.SIGKILL)
    try:
        yield
    finally:
        kill.cancel()


@dataclass(frozen=True)
class Case:
    """A load and what happens to the replicas meanwhile."""

    name: str
    load: SyntheticSpec
    trouble: Trouble = no_trouble


def conversations(count: int, turns: int, seed: int) -> SyntheticSpec:
    """All begin within a few seconds; people think for 2 s."""
    lengths = Lengths.parse("uniform:50:250"), Lengths.parse("uniform:32:96")
    return SyntheticSpec(count * turns, 10.0 * turns, *lengths, turns=turns, think_time=2.0, seed=seed)


def cases(count: int, turns: int) -> list[Case]:
    """`count` conversations of `turns` turns, and loads that are hard on a router."""
    single = Lengths.parse("64"), Lengths.parse("32")
    return [
        Case("conversations", conversations(count, turns, seed=1)),
        Case("one hot prefix", SyntheticSpec(4 * count, 16.0, *single, prefix_len=1024, seed=2)),
        Case("all misses", SyntheticSpec(4 * count, 16.0, Lengths.parse("uniform:100:500"), single[1], seed=3)),
        Case("a slow replica", conversations(count, turns, seed=4), slow_replica),
        Case("a dead replica", conversations(count, turns, seed=5), dead_replica),
    ]


def compare_routers(config: EngineConfig, replicas: int, count: int, turns: int, progress: Progress) -> dict[str, Any]:
    """Run every case under every policy.

    Returns:
        {"machine", "replicas", "rows": [...]}: a row for each case and policy with `cached_share`, latencies in ms,
        `spread` (the busiest replica's tokens over the mean) and the numbers of requests that completed and failed.
    """
    from ray import serve

    from cluster.ray_runtime import connect

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    runtime = connect(config.ray_address, min_cpus=config.tp_size * replicas + 2)
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        rows = []
        for policy, settings in POLICIES.items():
            progress(f"starting {replicas} replicas, {policy}", 0.0)
            deploy(config.model_copy(update=settings), replicas)
            wait_until_ready(f"http://127.0.0.1:{port}")
            for case in cases(count, turns):
                progress(f"{policy}: {case.name}", 0.0)
                measured = asyncio.run(measure(f"http://127.0.0.1:{port}", case))
                rows.append({"case": case.name, "policy": policy} | measured)
            serve.delete(APP)
        return {"machine": machine(), "replicas": replicas, "rows": rows}
    finally:
        serve.shutdown()
        runtime.close()


def deploy(config: EngineConfig, replicas: int) -> None:
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from cluster.serve.app import make_app

    quiet = LoggingConfig(enable_access_log=False)
    serve.run(make_app(config, {"num_replicas": replicas}), name=APP, route_prefix="/", logging_config=quiet)


async def measure(url: str, case: Case) -> dict[str, Any]:
    """One case: its load, open loop."""
    sessions = from_trace(synthetic_trace(case.load))
    async with Endpoint(url, "completions", None, None, {"ignore_eos": True, "temperature": 0.0}, TIMEOUT) as endpoint:
        await warm_up(endpoint, from_trace(synthetic_trace(conversations(1, 1, seed=99))), 1)
        before = await reports()
        async with case.trouble(list(before.values())):
            run = await send(endpoint, sessions, None, ProgressBar())
        after = await reports()
    tokens = [work(each) - work(before.get(name)) for name, each in after.items() if each["metrics"]]
    summary = summarise(run)
    return {
        "requests": summary["requests"],
        "completed": summary["completed"],
        "failed": summary["failed"],
        "errors": summary["errors"],
        "seconds": summary["seconds"],
        "cached_share": summary["cached_share"],
        "ttft_p50_ms": 1000 * summary["ttft_s"]["p50"],
        "ttft_p99_ms": 1000 * summary["ttft_s"]["p99"],
        "e2e_p50_ms": 1000 * summary["e2e_s"]["p50"],
        "e2e_p99_ms": 1000 * summary["e2e_s"]["p99"],
        "tokens_by_replica": tokens,
        "spread": float(max(tokens) / max(1.0, np.mean(tokens))),
    }


async def reports() -> dict[str, dict[str, Any]]:
    """What each engine replica that answers says of itself, by replica."""
    from ray import serve

    handle = serve.get_deployment_handle("engine", APP)
    answers = await handle.broadcast("report").results_async(timeout_s=20, return_exceptions=True)
    return {answer["replica"]: answer for answer in answers if not isinstance(answer, BaseException)}


def work(report: dict[str, Any] | None) -> int:
    """Tokens that a replica has computed so far."""
    metrics = report and report["metrics"]
    return metrics["prefilled_tokens"] + metrics["generation_tokens"] if metrics else 0


def plot(path: str, result: dict[str, Any]) -> None:
    """First tokens, cached share and spread of every case, side by side."""
    from matplotlib.figure import Figure

    rows = result["rows"]
    names = list(dict.fromkeys(row["case"] for row in rows))
    panels = (("ttft_p50_ms", "first token p50, ms"), ("ttft_p99_ms", "first token p99, ms"),
              ("cached_share", "prompt tokens from the cache"), ("spread", "busiest replica / mean"))  # fmt: skip
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        for place, policy in enumerate(POLICIES):
            values = [next(r[key] for r in rows if (r["case"], r["policy"]) == (name, policy)) for name in names]
            axes.bar(np.arange(len(names)) + 0.27 * (place - 1), values, 0.25, label=policy)
        axes.set_xticks(np.arange(len(names)), names, rotation=15)
        axes.set_title(title, fontsize=10)
        if key.startswith("ttft"):
            axes.set_yscale("log")
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
