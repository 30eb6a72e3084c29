"""Asks Serve for its applications and every engine replica for itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import StartupError

ENGINE = "engine"  # its deployment; engine-NAME where several models are served
_LEAST_WAIT = 0.1  # seconds left for one application's replicas when others took most of the time


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One engine replica as it reports itself (`EngineDeployment.report`); counters are totals since its start.

    `info` holds its settings and ranks; `problem` is None while it serves.
    """

    replica: str
    node_ip: str
    info: dict[str, Any]
    metrics: dict[str, Any]
    problem: str | None
    seen: float  # time.monotonic() of the answer

    @property
    def kv_use(self) -> float:
        """Share of the KV pages that requests hold; pages of the prefix cache that nobody uses do not count."""
        pages = self.metrics.get("total_pages", 0)
        free = self.metrics.get("free_pages", 0) + self.metrics.get("evictable_pages", 0)
        return (pages - free) / pages if pages else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the input tokens that came from the prefix cache, since the start."""
        cached = self.metrics.get("cached_tokens", 0)
        looked_up = cached + self.metrics.get("prefilled_tokens", 0)
        return cached / looked_up if looked_up else 0.0


@dataclass(frozen=True, slots=True)
class ApplicationStatus:
    """One Serve application. `deployments` maps a name to Serve's status and the replicas by state.

    `silent` are errors of engine replicas that did not report.
    """

    name: str
    status: str
    message: str
    deployments: dict[str, tuple[str, dict[str, int]]]
    replicas: list[ReplicaStatus] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)


def collect(timeout: float) -> list[ApplicationStatus]:
    """The applications with an engine deployment, on the Ray this process is connected to.

    `timeout` is in seconds, for all together; a replica that does not answer within it is in `silent`.

    Raises:
        StartupError: no such application is served.
    """
    from ray import serve

    deadline = time.monotonic() + timeout
    found = []
    for name, application in serve.status().applications.items():
        deployments = {
            each: (str(overview.status.value), {str(state): n for state, n in overview.replica_states.items()})
            for each, overview in application.deployments.items()
        }
        engines = [each for each in deployments if each == ENGINE or each.startswith(f"{ENGINE}-")]
        if not engines:
            continue
        status = ApplicationStatus(name, application.status.value, application.message, deployments)
        for engine in engines:
            if deployments[engine][1].get("RUNNING"):
                _ask_replicas(status, engine, max(_LEAST_WAIT, deadline - time.monotonic()))
        found.append(status)
    if not found:
        raise StartupError("nothing of raydix is served on this Ray cluster")
    return found


def rate(before: list[ApplicationStatus], now: list[ApplicationStatus], counter: str) -> dict[str, float]:
    """How fast a counter of each replica grew between two collections, per second, by replica id."""
    earlier = {replica.replica: replica for application in before for replica in application.replicas}
    rates = {}
    for application in now:
        for replica in application.replicas:
            last = earlier.get(replica.replica)
            if last is None or replica.seen <= last.seen:
                continue
            grown = replica.metrics.get(counter, 0) - last.metrics.get(counter, 0)
            rates[replica.replica] = max(0, grown) / (replica.seen - last.seen)
    return rates


def _ask_replicas(status: ApplicationStatus, engine: str, timeout: float) -> None:
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    handle = serve.get_deployment_handle(engine, status.name)
    try:
        answers = handle.broadcast("report").results(timeout_s=timeout, return_exceptions=True)
    except (RayError, RayServeException, TimeoutError) as error:
        status.silent.append(_first_line(error))
        return
    seen = time.monotonic()
    for answer in answers:
        if isinstance(answer, BaseException):
            status.silent.append(_first_line(answer))
            continue
        problem = answer["status"]["failure"] or answer["status"]["stalled"]
        if problem is None and answer["metrics"] is None:
            problem = "the engine does not answer"
        status.replicas.append(
            ReplicaStatus(answer["replica"], answer["node_ip"], answer["info"], answer["metrics"] or {}, problem, seen)
        )
    status.replicas.sort(key=lambda replica: replica.replica)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
