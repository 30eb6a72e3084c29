"""`raydix bench serving-path`: what HTTP and Ray cost a token, with an engine that answers at once.

Our server with `--device fake` and the usual way (`usual_way`) run in one Ray Serve and take turns.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
import statistics
from collections import Counter
from importlib.metadata import version
from typing import Any

import psutil

from cluster.bench.serve.client import Endpoint
from cluster.bench.serve.generator import send, warm_up
from cluster.bench.serve.report import summarise
from cluster.bench.serve.sessions import from_trace
from cluster.config import EngineConfig
from cluster.progress import Progress
from cluster.progress_bar import ProgressBar
from cluster.simulate.synthetic import Lengths, SyntheticSpec, synthetic_trace

PROMPT_WORDS = 32
TIMEOUT = 600.0
OURS, USUAL = "raydix", "usual way"
FEWEST_REQUESTS = 4
WARM_UP_STREAMS = 16


def compare_paths(config: EngineConfig, streams: list[int], tokens: int, repeats: int, progress: Progress) -> Any:
    """Measure both paths with so many concurrent streams of `tokens` tokens, alternating, `repeats` times.

    Returns:
        {"machine", "front", "own_loops", "rows", ...}: a row for each path and number of streams, the run
        of median throughput.
        `cpu_us_per_token` is that of all of Ray's processes, by process in `cpu_by_process`; the client's is apart.
    """
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from cluster.bench.serve.usual_way import build_app
    from cluster.ray_runtime import connect
    from cluster.serve import build_openai_app

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    runtime = connect(config.ray_address, min_cpus=config.tp_size + 2)
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        quiet = LoggingConfig(enable_access_log=False)
        progress("starting our server", 0.0)
        serve.run(build_openai_app(config), name="raydix", route_prefix="/", logging_config=quiet)
        progress("starting the usual way", 0.0)
        serve.run(build_app(), name="usual", route_prefix="/usual", logging_config=quiet)
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url)
        paths = ((OURS, url, None), (USUAL, url + "/usual", "usual"))
        progress("warming up", 0.0)
        for _, at, model in paths:
            asyncio.run(measure(at, model, WARM_UP_STREAMS, tokens, seed=repeats))
        rows = []
        for count in streams:
            runs: dict[str, list[dict[str, Any]]] = {OURS: [], USUAL: []}
            for number in range(repeats):
                for path, at, model in paths:
                    progress(f"{path}, {count} streams, run {number + 1} of {repeats}", 0.0)
                    runs[path].append(asyncio.run(measure(at, model, count, tokens, seed=number)))
            rows += [{"path": path, "streams": count} | median_run(found) for path, found in runs.items()]
        setting = {"machine": machine(), "front": front(), "own_loops": has_own_loops()}
        return setting | {"tokens": tokens, "repeats": repeats, "rows": rows}
    finally:
        serve.shutdown()
        runtime.close()


async def measure(url: str, model: str | None, streams: int, tokens: int, seed: int) -> dict[str, Any]:
    """One run: closed loop of `streams`, each request `tokens` tokens."""
    requests = max(streams, FEWEST_REQUESTS)
    lengths = Lengths.parse(str(PROMPT_WORDS)), Lengths.parse(str(tokens))
    sessions = from_trace(synthetic_trace(SyntheticSpec(requests + 1, float("inf"), *lengths, seed=seed)))
    extra = {"ignore_eos": True, "temperature": 0.0}
    async with Endpoint(url, "completions", model, None, extra, TIMEOUT) as endpoint:
        await warm_up(endpoint, sessions, 1)
        before = cpu_seconds()
        run = await send(endpoint, sessions[:-1], streams, ProgressBar())
        used = cpu_seconds()
    summary = summarise(run)
    if summary["completed"] != requests or summary["output_tokens"] != requests * tokens:
        raise RuntimeError(f"{summary['completed']} of {requests} requests completed: {summary['errors']}")
    total = summary["output_tokens"]
    spent: Counter[str] = Counter()
    for process, seconds in used.items():
        spent[process[1]] += 1e6 * (seconds - before.get(process, 0.0)) / total
    gaps, first = summary["itl_s"], summary["ttft_s"]
    return {
        "requests": requests,
        "tokens_per_s": summary["output_tokens_per_s"],
        "tokens_per_chunk": summary["tokens_per_chunk"],
        "itl_p50_ms": 1000 * gaps["p50"],
        "itl_p99_ms": 1000 * gaps["p99"],
        "tpot_p50_ms": 1000 * summary["tpot_s"]["p50"],
        "ttft_p50_ms": 1000 * first["p50"],
        "ttft_p99_ms": 1000 * first["p99"],
        "cpu_us_per_token": sum(spent.values()),
        "client_cpu_us_per_token": 1e6 * summary["client_cpu_s"] / total,
        "load": os.getloadavg()[0],
        "cpu_by_process": {name: value for name, value in sorted(spent.items()) if value >= 1},
    }


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run of median throughput, and the throughput of each."""
    rates = [run["tokens_per_s"] for run in runs]
    return runs[rates.index(statistics.median_low(rates))] | {"runs": rates}


def cpu_seconds() -> dict[tuple[int, str], float]:
    """CPU time so far of this process's descendants (a private Ray), by process id and name."""
    used: dict[tuple[int, str], float] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            name = (process.cmdline() or [process.name()])[0].rpartition("/")[2]
            times = process.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        # Ray's processes are called ray::ACTOR.METHOD after what they do right now
        used[process.pid, name.removeprefix("ray::").partition(".")[0]] = times.user + times.system
    return used


def wait_until_ready(url: str) -> None:
    """Returns when our server answers /ready; serve.run has waited for the replicas."""
    import time
    import urllib.error
    import urllib.request

    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url + "/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def front() -> str:
    """What takes HTTP connections, as Ray Serve's own switches say."""
    from ray.serve._private import constants

    if constants.RAY_SERVE_ENABLE_HA_PROXY:
        return "HAProxy"
    return "direct ingress" if constants.RAY_SERVE_ENABLE_DIRECT_INGRESS else "Serve's HTTP proxy"


def has_own_loops() -> bool:
    """Whether Serve's replicas run our code and their routers on event loops of their own, each in its thread."""
    switches = ("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP")
    return any(os.environ.get(name, "1") == "1" for name in switches)  # replicas read them when they start


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "ray": version("ray"),
    }
