"""Asks every engine replica and every ingress for what the dashboard shows, however many pages look."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.serve.service import Service

MAX_TREE_NODES = 160  # of each replica's radix tree: what a picture can show
_REFRESH = 0.5  # seconds for which an answer is good
_TIMEOUT = 2.0
_SETTINGS = (
    "served_model_name", "tp_size", "device", "dtype", "page_size", "max_running_requests", "max_seq_len", "policy",
    "driver_pid",
)  # fmt: skip
_COUNTERS = (
    "running", "waiting", "total_pages", "free_pages", "cached_pages", "evictable_pages", "prompt_tokens",
    "generation_tokens", "cached_tokens", "prefilled_tokens", "preemptions", "steps", "recoveries",
)  # fmt: skip
_WHEREABOUTS = ("node_ip", "pid", "gpu_ids")


class Collector:
    """Collects at most once in `_REFRESH` seconds; callers in between share an answer."""

    def __init__(self, engines: Sequence[DeploymentHandle]) -> None:
        own = serve.get_replica_context()
        self._engines = engines
        self._ingress = serve.get_deployment_handle(own.deployment, own.app_name)
        self._lock = asyncio.Lock()
        self._state: dict[str, Any] = {}
        self._until = 0.0

    async def state(self) -> dict[str, Any]:
        """`time` (Unix seconds), `replicas` and `ingresses` as they answered, and `silent`, errors of those that did
        not. Counters and histograms are totals since the start of their process."""
        async with self._lock:
            if time.monotonic() >= self._until:
                self._state = await self._collect()
                self._until = time.monotonic() + _REFRESH
            return self._state

    async def _collect(self) -> dict[str, Any]:
        ingresses, *found = await asyncio.gather(
            _ask(self._ingress, "facts"), *(_ask(engine, "picture", MAX_TREE_NODES) for engine in self._engines)
        )
        engines = [each for of_model in found for each in of_model]
        answers = [*engines, *ingresses]
        return {
            "time": time.time(),
            "replicas": sorted((_replica(each) for each in engines if isinstance(each, dict)), key=_name),
            "ingresses": [facts for each in ingresses if isinstance(each, list) for facts in each],
            "silent": [_first_line(each) for each in answers if isinstance(each, BaseException)],
        }


def ingress_facts(service: Service) -> dict[str, Any]:
    """What the clients of one ingress saw of one model: histograms as in `Histogram.snapshot`, in seconds."""
    metrics = service.engine.metrics
    return {
        "name": f"{serve.get_replica_context().replica_id.unique_id} {service.model}",
        "open_streams": service.engine.open_streams,
        "first_token": metrics.first_token.snapshot(),
        "between_tokens": metrics.between_tokens.snapshot(),
    }


async def _ask(handle: DeploymentHandle, method: str, *arguments: Any) -> list[Any]:
    """The answers of all replicas of a deployment, or what was raised instead."""
    try:
        return await handle.broadcast(method, *arguments).results_async(timeout_s=_TIMEOUT, return_exceptions=True)
    except (RayError, RayServeException, TimeoutError, asyncio.TimeoutError) as error:
        return [error]


def _replica(report: dict[str, Any]) -> dict[str, Any]:
    """What of `EngineDeployment.picture` a page may see: no key, no path."""
    info, metrics, status = report["info"], report["metrics"], report["status"]
    problem = status["failure"] or status["stalled"]
    if problem is None and metrics is None:
        problem = "the engine does not answer"
    return {
        "name": report["replica"],
        "node_ip": report["node_ip"],
        "problem": problem,
        "recovering": status["failure"] is None and status["stalled"] is not None,
        "settings": {name: info[name] for name in _SETTINGS},
        "ranks": [{name: rank[name] for name in _WHEREABOUTS} for rank in info["ranks"]],
        "metrics": None if metrics is None else {name: metrics[name] for name in _COUNTERS},
        "tree": report["tree"],
    }


def _name(replica: dict[str, Any]) -> str:
    return replica["name"]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
