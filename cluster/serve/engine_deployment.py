"""The engine as a Serve deployment: one CPU actor that owns a driver and, through it, the ranks.

It asks Serve for no placement group: the engine makes its own for the ranks alone, so that the group can be removed
and made again while this actor lives, and goes when it goes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import ray
from ray import serve

from cluster.config import EngineConfig
from cluster.driver import PROBE_INTERVAL
from cluster.engine import Engine
from cluster.errors import EngineError, RaydixError, TransportError
from cluster.routing import digest_block
from cluster.serve.autoscaling import METRIC
from cluster.serve.engine_call import EngineCall
from cluster.serve.errors import to_wire
from cluster.serve.publisher import Publisher
from cluster.serve.side_channel import ReplyAddress
from cluster.serve.step_sender import StepSender, join_request_id
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.request import Request

logger = logging.getLogger("ray.serve")

STALE_SECONDS = 3 * PROBE_INTERVAL
COMPILERS = 4  # grammars at a time: most take a millisecond, the worst a second


@serve.deployment(
    name="engine",
    num_replicas=1,
    ray_actor_options={"num_cpus": 0.1},
    max_constructor_retry_count=1,
    health_check_period_s=2,
    logging_config={"enable_access_log": False},  # the ingress logs requests
    graceful_shutdown_wait_loop_s=0.5,
)
class EngineDeployment:
    """Runs one engine. Errors a caller can act on are answered as values, so that Ray does not wrap or log them."""

    def __init__(self, config: EngineConfig) -> None:
        self._sender = StepSender(ray.get_runtime_context().get_node_id())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._compiling = ThreadPoolExecutor(COMPILERS, thread_name_prefix="raydix-compile")
        self._engine = Engine(config, self._on_outputs, self._on_failure)
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._reports = Publisher(self._replica, digest_block(config.page_size), self._engine, self._sender)
        self._engine.start(_log_progress)

    async def generate(self, call: bytes, work: int = 0) -> dict[str, Any]:
        """One request, an `EngineCall`. Its tokens go to the call's address step by step; this returns when it has
        ended. `work`: see `cluster.serve.fleet.Ticket`. Cancelling the call aborts the request.

        Returns:
            {"finish": FinishReason} or {"error": see `errors.to_wire`}; with "refused" if the request never ran.
        """
        asked = EngineCall.decode(call)
        self._loop = asyncio.get_running_loop()
        try:
            channel = await self._sender.connect(asked.address)
            request_id = join_request_id(channel, asked.stream_id)
            ended = self._open[request_id] = self._loop.create_future()
            try:
                request = Request(
                    request_id, asked.prompt_ids, asked.sampling, asked.priority, asked.user, asked.prompt_len
                )
                if asked.sampling.structured_outputs is not None:
                    await self._loop.run_in_executor(self._compiling, self._engine.grammars.prepare, request)
                self._engine.submit(request)
                with self._reports.counted(channel, work):
                    return await ended
            except asyncio.CancelledError:
                self._engine.abort(request_id)
                raise
            finally:
                del self._open[request_id]
        except RaydixError as error:
            return {"error": to_wire(error), "refused": True}

    async def subscribe(self, address: ReplyAddress) -> None:
        """From now on reports go to this ingress (`replica_report`), until it is gone."""
        self._reports.subscribe(await self._sender.connect(address))

    async def status(self) -> dict[str, Any]:
        """`failure`: why the engine is lost, or None; `stalled`: why it is not ready, or None; and its counters."""
        recovering = self._engine.recovering
        failure = self._engine.failure
        overdue = self._engine.overdue
        stalled = None
        if recovering is not None:
            stalled = f"its workers are being started again: {recovering}"
        elif overdue > STALE_SECONDS:
            stalled = f"no step has finished for {overdue:.0f} s longer than it should take"
        return {
            "replica": self._replica,
            "failure": None if failure is None else str(failure),
            "stalled": stalled,
            "stats": await asyncio.to_thread(self._engine.stats),
        }

    async def metrics(self) -> dict[str, Any]:
        """The engine's stats and metrics under their names in `Engine.stats` and `Engine.metrics`, and `outstanding`.

        Raises:
            EngineError: the engine has failed.
        """
        stats = await asyncio.to_thread(self._engine.stats)
        if not stats:
            raise self._engine.failure or EngineError("the engine does not answer")
        return stats | self._engine.metrics() | {"replica": self._replica, "outstanding": self._reports.outstanding}

    async def record_flight(self) -> dict[str, Any]:
        """Save what the flight recorder holds. Returns {"replica", "node_ip", "file"}, or {"replica", "error"}: see
        `errors.to_wire`."""
        try:
            path = await asyncio.to_thread(self._engine.record_flight)
        except RaydixError as error:
            return {"replica": self._replica, "error": to_wire(error)}
        return {"replica": self._replica, "node_ip": ray.util.get_node_ip_address(), "file": str(path)}

    async def info(self) -> dict[str, Any]:
        """The effective settings under their names in `EngineConfig`, and what an ingress must know of the model."""
        info = self._engine.info
        return info.config.model_dump() | {
            "model": str(info.model_path),
            "served_model_name": info.served_name,
            "vocab_size": info.vocab_size,
            "startup_seconds": info.startup_seconds,
            "driver_pid": os.getpid(),
            "ranks": [asdict(rank) for rank in info.ranks],
        }

    async def report(self) -> dict[str, Any]:
        """All that `raydix status` shows of this replica: `info`, `status`, and `metrics` while the engine answers."""
        status = await self.status()
        return {
            "replica": self._replica,
            "node_ip": ray.util.get_node_ip_address(),
            "info": await self.info(),
            "status": status,
            "metrics": await self.metrics() if status["stats"] else None,
        }

    async def picture(self, max_nodes: int) -> dict[str, Any]:
        """All that the dashboard shows of this replica: `report`, and `tree`, a list of at most `max_nodes` tuples;
        see `NodeSummary`."""
        tree = await asyncio.to_thread(self._engine.cache_summary, max_nodes)
        return await self.report() | {"tree": [tuple(node) for node in tree]}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls this; see `autoscaling`."""
        return {METRIC: float(self._reports.outstanding)}

    def check_health(self) -> None:
        """Serve calls this; a failed engine does not heal, so Serve replaces the replica.

        Raises:
            EngineError: the engine has failed.
        """
        if self._engine.failure is not None:
            raise self._engine.failure

    def _on_outputs(self, outputs: StepOutputs) -> None:
        """Runs in the driver's thread, once per step."""
        lost = self._sender.send(outputs)
        for request_id in lost:
            self._engine.abort(request_id)
        if lost and self._loop is not None:
            error = TransportError("the connection to the ingress was lost")
            self._loop.call_soon_threadsafe(self._fail, lost, error)
        finished = outputs.finish != FinishReason.NONE
        if finished.any() and self._loop is not None:
            pairs = zip(outputs.request_ids[finished].tolist(), outputs.finish[finished].tolist(), strict=True)
            self._loop.call_soon_threadsafe(self._end, list(pairs))

    def _end(self, finishes: list[tuple[int, int]]) -> None:
        for request_id, finish in finishes:
            ended = self._open.get(request_id)
            if ended is not None and not ended.done():
                ended.set_result({"finish": finish})

    def _on_failure(self, error: EngineError) -> None:
        """Runs in the driver's thread, once: every open request ends with this error."""
        logger.error("the engine failed: %s", error)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._fail_all, error)

    def _fail_all(self, error: EngineError) -> None:
        self._fail(list(self._open), error)

    def _fail(self, request_ids: list[int], error: RaydixError) -> None:
        for request_id in request_ids:
            ended = self._open.get(request_id)
            if ended is not None and not ended.done():
                ended.set_result({"error": to_wire(error)})

    def __del__(self) -> None:
        """Serve calls this when the replica stops."""
        self._engine.shutdown()
        self._sender.close()


def _log_progress(what: str, share: float) -> None:
    logger.info("%s: %.0f%%", what, 100 * share)
