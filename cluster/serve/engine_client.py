"""The ingress's side of an engine: one Serve call per stream, open as long as the stream, and its cancellation."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from cluster.detokenizer import IncrementalDetokenizer
from cluster.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    OverloadedError,
    RaydixError,
    TransportError,
)
from cluster.serve.errors import RequestTimeoutError, from_wire
from cluster.serve.metrics import IngressMetrics
from cluster.serve.step_receiver import StepReceiver
from cluster.serve.streams import Delta, StreamGroup, StreamTable, TokenStream
from cluster.tokenizer import Tokenizer
from scheduler.sampling_params import SamplingParams

logger = logging.getLogger("ray.serve")

LAST_TOKENS_GRACE = 5.0  # seconds between the end of a call and its last tokens on the side channel
STATUS_TIMEOUT = 2.0


@dataclass(frozen=True)
class GroupOptions:
    """How the streams of one HTTP request are served.

    arrived              `time.monotonic()` of the request, from which latencies and the deadline count
    timeout              seconds from then to the last token; None: no limit
    continues_text, include_stop, skip_special_tokens   see `IncrementalDetokenizer`
    priority, user       see `scheduler.request.Request`
    """

    arrived: float
    timeout: float | None = None
    skip_special_tokens: bool = True
    continues_text: bool = False
    include_stop: bool = False
    priority: int = 0
    user: str | None = None


class EngineClient:
    """Opens groups of streams on the engine deployment. All methods run in the event loop."""

    def __init__(self, handle: DeploymentHandle, tokenizer: Tokenizer, node_id: str, node_ip: str) -> None:
        self._handle = handle
        self._tokenizer = tokenizer
        self.metrics = IngressMetrics()
        self._table = StreamTable(asyncio.get_running_loop(), self.metrics)
        self._receiver = StepReceiver(self._table.on_message, node_id, node_ip)
        self._calls: dict[TokenStream, DeploymentResponse] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._deadlines: dict[StreamGroup, asyncio.TimerHandle] = {}

    def open(self, requests: Sequence[tuple[list[int], SamplingParams]], options: GroupOptions) -> StreamGroup:
        """Start one engine request per (prompt ids, sampling) pair; the group's choice i is pair i.

        The caller closes the group with `close_group`.
        """
        group = StreamGroup(self._on_end)
        if options.timeout is not None:
            left = options.arrived + options.timeout - time.monotonic()
            error = RequestTimeoutError(f"the request was not finished within its {options.timeout:g} s")
            self._deadlines[group] = asyncio.get_running_loop().call_later(left, group.fail, error)
        for index, (prompt, params) in enumerate(requests):
            detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                params.stop,
                options.skip_special_tokens,
                continues_text=options.continues_text,
                include_stop=options.include_stop,
            )
            stream = self._table.open(
                detokenizer, group, index, options.arrived, options.include_stop, params.logprobs or 0
            )
            response = self._handle.generate.remote(
                self._receiver.address,
                stream.stream_id,
                np.array(prompt, dtype=np.int32),
                params,
                options.priority,
                options.user,
            )
            self._calls[stream] = response
            task = asyncio.create_task(self._follow(stream, response))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return group

    def close_group(self, group: StreamGroup) -> None:
        """Abort whatever of this group still runs. Safe to call at any time, and again."""
        if group in self._deadlines:
            self._deadlines.pop(group).cancel()
        for stream in group.streams:
            self._table.forget(stream)
            if not stream.ended:
                self.metrics.ended(time.monotonic() - stream.arrived, "abort")
            stream.ended = True
            if not stream.engine_ended:
                self._cancel(stream)

    async def status(self) -> dict[str, Any]:
        """The engine's status. Raises EngineError as `_ask` does."""
        return await self._ask("status")

    async def engine_metrics(self) -> dict[str, Any] | None:
        """See `EngineDeployment.metrics`; None if it does not answer or has failed."""
        try:
            return await self._ask("metrics")
        except RaydixError:
            return None

    async def _ask(self, method: str) -> dict[str, Any]:
        """The answer of a method of the engine deployment without arguments.

        Raises:
            EngineError: it does not answer within STATUS_TIMEOUT seconds, or is gone.
        """
        try:
            return await asyncio.wait_for(getattr(self._handle, method).remote(), STATUS_TIMEOUT)
        except asyncio.TimeoutError:
            raise EngineError(f"the engine does not answer within {STATUS_TIMEOUT:g} s") from None
        except Exception as error:
            raise _engine_error(error) from error

    @property
    def open_streams(self) -> int:
        return len(self._table)

    @property
    def dropped_messages(self) -> int:
        return self._receiver.dropped

    def close(self) -> None:
        self._receiver.close()

    def _on_end(self, stream: TokenStream, last: Delta) -> None:
        """A stream's last delta was delivered: when a stop string ended it, the engine does not know yet."""
        self._table.forget(stream)
        self.metrics.ended(time.monotonic() - stream.arrived, last.finish_reason or "error")
        if not stream.engine_ended:
            self._cancel(stream)

    def _cancel(self, stream: TokenStream) -> None:
        response = self._calls.pop(stream, None)
        if response is not None:
            response.cancel()

    async def _follow(self, stream: TokenStream, response: DeploymentResponse) -> None:
        """Wait for the end of the call; tell the stream if it ended badly."""
        try:
            reply = await response
        except Exception as error:
            if not stream.ended:  # else it is our own cancellation
                stream.group.deliver(stream, Delta(error=_engine_error(error)))
            return
        finally:
            self._calls.pop(stream, None)
        stream.engine_ended = True
        if "error" in reply:
            stream.group.deliver(stream, Delta(error=from_wire(reply["error"])))
        elif not stream.ended:
            asyncio.get_running_loop().call_later(LAST_TOKENS_GRACE, self._expire, stream)

    def _expire(self, stream: TokenStream) -> None:
        stream.group.deliver(stream, Delta(error=TransportError("the last tokens did not arrive on the side channel")))


def _engine_error(error: Exception) -> RaydixError:
    """Ray's and Serve's errors of an engine call as ours."""
    if isinstance(error, RaydixError):
        return error
    if isinstance(error, ray.exceptions.TaskCancelledError):
        return EngineClosedError("the engine stopped before the request was finished")
    if isinstance(error, BackPressureError):
        return OverloadedError("too many requests are waiting; try again later")
    if isinstance(error, ray.exceptions.RayActorError | RayServeException):
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return EngineDeadError(f"the engine is gone: {first_line}")
    logger.error("an engine call failed", exc_info=error)
    return EngineError("internal error in the engine; its log has the details")
