"""The ingress's side of an engine: one Serve call per stream, open as long as the stream, and its cancellation.

When the engine's process dies under a stream, or its engine fails while there is another, the stream is sent to another
with the tokens it has (`failover`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import numpy as np
import ray
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from cluster.config import EngineConfig
from cluster.detokenizer import IncrementalDetokenizer
from cluster.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    NotReadyError,
    OverloadedError,
    RaydixError,
    TransportError,
)
from cluster.routing import digest_block
from cluster.serve.call_errors import engine_error, is_gone
from cluster.serve.engine_call import EngineCall
from cluster.serve.errors import RequestTimeoutError, from_wire
from cluster.serve.failover import Failover, Loss
from cluster.serve.fleet import Fleet, Ticket
from cluster.serve.metrics import IngressMetrics
from cluster.serve.open_call import GroupOptions, OpenCall, Prompt
from cluster.serve.router import TICKET
from cluster.serve.step_receiver import StepReceiver
from cluster.serve.streams import StreamGroup, StreamTable
from cluster.serve.subscriber import Subscriber
from cluster.serve.token_stream import Delta, TokenStream
from cluster.tokenizer import Tokenizer
from scheduler.sampling_params import SamplingParams

logger = logging.getLogger("ray.serve")

LAST_TOKENS_GRACE = 2.0  # seconds between the end of a call and its last tokens on the side channel
DRAIN_CHECK = 0.05
LAST_EVENTS_GRACE = 3.0  # seconds for clients to take the error that ends their stream


class EngineClient:
    """Opens groups of streams on the engine deployment. All methods run in the event loop."""

    def __init__(
        self, handle: DeploymentHandle, tokenizer: Tokenizer, node_id: str, node_ip: str, config: EngineConfig
    ) -> None:
        self._handle = handle
        self._room = config.max_running_requests + config.max_queued_requests
        self._tokenizer = tokenizer
        self.metrics = IngressMetrics()
        self.fleet = Fleet(digest_block(config.page_size), config.router_beta, config.router_digest_size)
        self._table = StreamTable(asyncio.get_running_loop(), self.metrics, self._on_gap)
        self._receiver = StepReceiver(self._table.on_message, node_id, node_ip, self.fleet.learn)
        self._subscriber = Subscriber(handle, self._receiver.address, self.fleet)
        self._failover = Failover(config.replica_timeout, self._submit, self._fail, self._is_held)
        self._calls: dict[TokenStream, OpenCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._deadlines: dict[StreamGroup, asyncio.TimerHandle] = {}
        self._groups: set[StreamGroup] = set()  # open ones
        self.draining = False

    def open(self, requests: Sequence[tuple[list[int], SamplingParams]], options: GroupOptions) -> StreamGroup:
        """Start one engine request per (prompt ids, sampling) pair; the group's choice i is pair i.

        The caller closes the group with `close_group`.

        Raises:
            NotReadyError: since `drain` was called.
            OverloadedError: the engine is gone, and as many streams as it takes wait for another already.
        """
        if self.draining:
            raise NotReadyError("the server is stopping and takes no new requests")
        if self._failover.active and len(self._table) + len(requests) > self._room:
            raise OverloadedError(
                f"the engine's process is gone, and {len(self._table)} requests wait for another already"
            )
        group = StreamGroup(self._on_end)
        self._groups.add(group)
        if options.timeout is not None:
            left = options.arrived + options.timeout - time.monotonic()
            error = RequestTimeoutError(f"the request was not finished within its {options.timeout:g} s")
            self._deadlines[group] = asyncio.get_running_loop().call_later(left, group.fail, error)
        try:
            shared, shared_ids = None, None  # a prompt's choices follow each other
            for index, (prompt, params) in enumerate(requests):
                if prompt is not shared_ids:
                    shared, shared_ids = Prompt(np.array(prompt, dtype=np.int32)), prompt
                self._open_stream(group, index, shared, params, options)
        except Exception:
            self.close_group(group)
            raise
        return group

    def _open_stream(
        self, group: StreamGroup, index: int, prompt: Prompt, params: SamplingParams, options: GroupOptions
    ) -> None:
        detokenizer = IncrementalDetokenizer(
            self._tokenizer,
            params.stop,
            options.skip_special_tokens,
            continues_text=options.continues_text,
            include_stop=options.include_stop,
            min_tokens=params.min_tokens,
        )
        stream = self._table.open(
            detokenizer, group, index, options.arrived, options.include_stop, params.logprobs or 0
        )
        self._calls[stream] = OpenCall(prompt, params, options)
        self._failover.admit(stream)

    def close_group(self, group: StreamGroup) -> None:
        """Abort whatever of this group still runs. Safe to call at any time, and again."""
        self._groups.discard(group)
        if group in self._deadlines:
            self._deadlines.pop(group).cancel()
        for stream in group.streams:
            self._table.forget(stream)
            if not stream.ended:
                self.metrics.ended(time.monotonic() - stream.arrived, "abort")
            stream.ended = True
            self._forget_call(stream)

    async def drain(self, grace: float) -> int:
        """Open nothing more, and return when what is open has ended and was sent. What has not ended after `grace`
        seconds ends with EngineClosedError; returns the number of these groups."""
        self.draining = True
        await self._wait_until_closed(grace)
        late = list(self._groups)
        for group in late:
            group.fail(EngineClosedError(f"the server stops, and this did not end within {grace:g} s (drain_timeout)"))
        await self._wait_until_closed(LAST_EVENTS_GRACE)
        return len(late)

    async def _wait_until_closed(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._groups and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_CHECK)

    @property
    def open_streams(self) -> int:
        return len(self._table)

    @property
    def dropped_messages(self) -> int:
        return self._receiver.dropped

    def check_health(self) -> None:
        """Raises EngineError when no token can arrive any more."""
        if not self._receiver.alive:
            raise EngineError("the thread that receives tokens has ended: this ingress must be replaced")

    def close(self) -> None:
        self._subscriber.close()
        self._receiver.close()

    def _on_end(self, stream: TokenStream, last: Delta) -> None:
        """A stream's last delta was delivered: when a stop string ended it, the engine does not know yet."""
        self._table.forget(stream)
        self.metrics.ended(time.monotonic() - stream.arrived, last.finish_reason or "error")
        self._forget_call(stream)

    def _submit(self, stream: TokenStream) -> None:
        """Call the engine for this stream, from where its tokens end."""
        call = self._calls.get(stream)
        if call is not None:
            call.context.run(self._start_call, stream, call)

    def _start_call(self, stream: TokenStream, call: OpenCall) -> None:
        sampling = call.sampling
        if stream.tokens and sampling.prompt_logprobs is not None:  # they came with the first token
            sampling = sampling.model_copy(update={"prompt_logprobs": None})
        call.starts += 1
        ids = call.prompt.ids
        if stream.tokens:
            ids = np.concatenate([ids, np.array(stream.tokens, dtype=np.int32)])
            ticket = self.fleet.ticket(ids, sampling.max_tokens - len(stream.tokens))
        else:
            ticket = call.prompt.ticket(self.fleet, sampling.max_tokens)
        call.ticket = ticket
        asked = EngineCall(
            self._receiver.address,
            stream.stream_id,
            ids,
            sampling,
            call.options.priority,
            call.options.user,
            len(call.prompt.ids),
        )
        call.response = self._handle.generate.remote(asked.encode(), **{TICKET: ticket})
        task = asyncio.create_task(self._follow(stream, call, call.response, ticket))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_held(self, stream: TokenStream) -> bool:
        call = self._calls.get(stream)
        return call is not None and call.ticket is not None and self.fleet.is_held(call.ticket)

    def _forget_call(self, stream: TokenStream) -> None:
        call = self._calls.pop(stream, None)
        if call is not None and call.response is not None and not stream.engine_ended:
            call.response.cancel()

    async def _follow(self, stream: TokenStream, call: OpenCall, response: DeploymentResponse, ticket: Ticket) -> None:
        """Wait for the end of the call; tell the stream if it ended badly."""
        try:
            reply = await response
            replica = ticket.replica
        except Exception as error:
            if stream.ended or call.response is not response:  # our own cancellation
                return
            if isinstance(error, ray.exceptions.TaskCancelledError):
                self._lose(stream, str(engine_error(error)), Loss.CLOSED)
            elif is_gone(error):
                self._lose(stream, str(engine_error(error)), Loss.DEATH)
            else:
                self._fail(stream, engine_error(error))
            return
        finally:
            ticket.close()
        if call.response is not response:
            return
        error = from_wire(reply["error"]) if "error" in reply else None
        if isinstance(error, TransportError):
            self._lose(stream, str(error), Loss.CONNECTION)
        elif isinstance(error, EngineClosedError) or (isinstance(error, OverloadedError) and call.starts > 1):
            self._lose(stream, str(error), Loss.CLOSED)
        elif isinstance(error, EngineDeadError) and self.fleet.failed(replica):
            self._lose(stream, str(error), Loss.CLOSED if reply.get("refused") else Loss.DEATH)
        elif error is not None:
            stream.engine_ended = True
            self._fail(stream, error)
        else:
            stream.engine_ended = True
            if not stream.ended:
                asyncio.get_running_loop().call_later(LAST_TOKENS_GRACE, self._expire, stream, response)

    def _expire(self, stream: TokenStream, response: DeploymentResponse) -> None:
        call = self._calls.get(stream)
        if call is not None and call.response is response:
            self._lose(stream, "the last tokens did not arrive on the side channel", Loss.CONNECTION)

    def _on_gap(self, streams: list[TokenStream]) -> None:
        for stream in streams:
            self._lose(stream, "tokens were lost on the side channel", Loss.CONNECTION)

    def _lose(self, stream: TokenStream, cause: str, loss: Loss) -> None:
        """Let the stream go on elsewhere, unless all of it is here."""
        call = self._calls.get(stream)
        if call is None or stream.ended or not self._table.renew(stream):
            return
        stream.engine_ended = False
        if call.response is not None:
            call.response, before = None, call.response
            before.cancel()
        self.metrics.resubmitted += 1
        self._failover.lost(stream, cause, loss)

    def _fail(self, stream: TokenStream, error: RaydixError) -> None:
        stream.group.deliver(stream, Delta(error=error))
