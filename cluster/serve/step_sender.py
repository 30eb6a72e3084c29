"""The engine's end of the side channel: after each step, one message to every ingress that has streams in it."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import zmq

from cluster.curve import connect_with
from cluster.errors import TransportError
from cluster.serve.replica_report import REPORT, ReplicaReport
from cluster.serve.side_channel import ReplyAddress, StepMessage
from scheduler.outputs import StepOutputs
from scheduler.step import LogprobBlock, SampledLogprobs

STREAM_BITS = 40  # request id = channel << STREAM_BITS | stream id
STREAM_MASK = (1 << STREAM_BITS) - 1
SEND_BACKLOG = 10_000  # steps an ingress may lag behind before it counts as gone
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000


def join_request_id(channel: int, stream_id: int) -> int:
    """The engine's request id of an ingress's stream."""
    return channel << STREAM_BITS | stream_id


def _share(logprobs: SampledLogprobs, mine: np.ndarray) -> SampledLogprobs:
    """The part that belongs to the entries of which `mine` (bool[n]) is true, numbered among those."""
    kept = mine[logprobs.index]
    places = np.cumsum(mine) - 1
    return SampledLogprobs(places[logprobs.index[kept]], LogprobBlock(logprobs.block.words[kept]))


@dataclass
class _Channel:
    socket: zmq.Socket
    secret: bytes
    name: bytes = field(default_factory=lambda: secrets.token_bytes(8))
    sent: int = 0


class StepSender:
    """Keeps one connected socket per ingress and splits each step's outputs among them.

    A channel number is part of the request ids, so splitting is array work whatever the number of streams. Sockets
    queue to live connections only (IMMEDIATE): when an ingress goes away, the next send to it fails at once.
    Thread-safe: a lock guards the sockets.
    """

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}  # ReplyAddress.name -> channel
        self._channels: dict[int, _Channel] = {}
        self._connecting: dict[str, asyncio.Task[int]] = {}
        self._next_number = 1

    async def connect(self, address: ReplyAddress, timeout: float = 5.0) -> int:
        """The channel of this ingress; connects on first use. Call from one event loop only.

        Raises:
            TransportError: no connection within `timeout` seconds.
        """
        number = self._numbers.get(address.name)
        if number is not None:
            return number
        if address.name not in self._connecting:
            self._connecting[address.name] = asyncio.create_task(self._connect(address, timeout))
        return await asyncio.shield(self._connecting[address.name])

    async def _connect(self, address: ReplyAddress, timeout: float) -> int:
        endpoint = address.ipc if address.node_id == self._node_id else address.tcp
        socket = self._context.socket(zmq.PUSH)
        socket.immediate = True
        socket.linger = 0
        socket.sndhwm = SEND_BACKLOG
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
        if endpoint == address.tcp:
            connect_with(socket, address.client_keys, address.server_key)
        try:
            socket.connect(endpoint)
            writable = await asyncio.to_thread(socket.poll, int(1000 * timeout), zmq.POLLOUT)
            if not writable:
                raise TransportError(f"cannot reach the ingress at {endpoint} within {timeout:g} s")
        except BaseException:
            socket.close()
            raise
        finally:
            del self._connecting[address.name]
        with self._lock:
            number, self._next_number = self._next_number, self._next_number + 1
            self._channels[number] = _Channel(socket, address.secret)
            self._numbers[address.name] = number
        return number

    def send(self, outputs: StepOutputs) -> list[int]:
        """Send a step's outputs to the ingresses they belong to.

        Returns:
            Request ids whose ingress, or the connection to it, is gone; nobody will read their tokens any more.
        """
        if not len(outputs.request_ids):
            return []
        owners = outputs.request_ids >> STREAM_BITS
        stream_ids = outputs.request_ids & STREAM_MASK
        lost: list[int] = []
        with self._lock:
            for number in np.unique(owners).tolist():
                mine = owners == number
                channel = self._channels.get(number)
                if channel is None:
                    lost += outputs.request_ids[mine].tolist()
                    continue
                message = StepMessage(
                    channel=channel.name,
                    number=channel.sent,
                    step_id=outputs.step_id,
                    stream_ids=stream_ids[mine],
                    tokens=outputs.tokens[mine],
                    finish=outputs.finish[mine],
                    cached_tokens=outputs.cached_tokens[mine],
                    errors={
                        key & STREAM_MASK: text for key, text in outputs.errors.items() if key >> STREAM_BITS == number
                    },
                    logprobs=None if outputs.logprobs is None else _share(outputs.logprobs, mine),
                    prompt_logprobs={
                        key & STREAM_MASK: block
                        for key, block in outputs.prompt_logprobs.items()
                        if key >> STREAM_BITS == number
                    },
                )
                if self._send(number, message.encode):
                    channel.sent += 1
                else:
                    lost += outputs.request_ids[mine].tolist()
        return lost

    def send_report(self, number: int, report: ReplicaReport) -> bool:
        """Send a report to one ingress; False if it is gone."""
        with self._lock:
            return number in self._channels and self._send(number, report.encode, REPORT)

    def _send(self, number: int, encode: Callable[[bytes], bytes], *frames: bytes) -> bool:
        channel = self._channels[number]
        try:
            channel.socket.send_multipart([*frames, encode(channel.secret)], zmq.DONTWAIT)
            return True
        except zmq.Again:
            channel.socket.close()
            del self._channels[number]
            self._numbers = {name: other for name, other in self._numbers.items() if other != number}
            return False

    def close(self) -> None:
        """Close every socket."""
        with self._lock:
            self._channels.clear()
            self._numbers.clear()
            self._context.destroy(linger=0)
