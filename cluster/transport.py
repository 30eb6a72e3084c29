"""Steps over ZeroMQ: one ROUTER per address family at the driver, DEALERs at the ranks.

Ranks on the driver's node use ipc in a private directory, the others tcp on a port the kernel picks, with CURVE. Each
rank's socket carries a routing id that only the driver and that rank know, so a frame from anybody else is dropped and
counted whatever it holds. All methods belong to one thread at a time, except `wake`, which any thread may call.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from cluster import messages
from cluster.curve import AllowList, KeyPair, connect_with, serve_with
from cluster.errors import TransportError
from cluster.ipc_directory import IpcDirectory

MAX_MESSAGE_BYTES = 256 << 20
# A peer node that vanishes without closing its sockets (power, network) shows after this long; ipc needs none.
HEARTBEAT_INTERVAL_MS, HEARTBEAT_TIMEOUT_MS = 2_000, 10_000
_CONNECTION_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED


class Frame(NamedTuple):
    """What arrived from a rank: kind byte (`messages.PLAN`, ...) and body."""

    rank: int
    kind: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class RankAddress:
    """All that a rank needs to reach its driver; travels as a Ray actor argument, never over the sockets.

    `token` and `result_token` are the routing ids of the rank's two sockets. `keys` and `server_key` are set for tcp.
    """

    endpoint: str
    token: bytes
    result_token: bytes
    keys: KeyPair | None = None
    server_key: bytes | None = None

    def __repr__(self) -> str:
        return f"RankAddress({self.endpoint})"


class DriverTransport:
    """The driver's sockets for one group of ranks.

    `local[rank]` says whether the rank lives on the driver's node; `node_ip` is the address tcp sockets bind to.
    """

    def __init__(self, local: list[bool], node_ip: str) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._unknown_frames = 0
        self._handshakes_missing = 0
        self._directory: IpcDirectory | None = None
        self._allow_list: AllowList | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._poller.register(self._wake_receiver, zmq.POLLIN)
        self._routers: list[zmq.Socket] = []
        self._monitors: list[zmq.Socket] = []
        self._rank_of: dict[bytes, int] = {}
        self._route: list[tuple[zmq.Socket, bytes]] = []  # per rank: its router and routing id
        self.addresses: list[RankAddress] = []
        ipc = self._bind_ipc() if any(local) else None
        keys = {rank: KeyPair.make() for rank, near in enumerate(local) if not near}
        server_keys = KeyPair.make()
        tcp = self._bind_tcp(node_ip, server_keys, {pair.public for pair in keys.values()}) if keys else None
        for rank, near in enumerate(local):
            router = ipc if near else tcp
            token, result_token = secrets.token_bytes(16), secrets.token_bytes(16)
            # libzmq reserves routing ids that start with a zero byte
            token, result_token = b"R" + token, b"R" + result_token
            self._rank_of |= {token: rank, result_token: rank}
            self._route.append((router, token))
            endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
            server_key = None if near else server_keys.public
            self.addresses.append(RankAddress(endpoint, token, result_token, keys.get(rank), server_key))

    @property
    def strangers(self) -> int:
        """Dropped frames, and connections without a good handshake (wrong keys, other protocols), so far.

        libzmq does not report every kind of bad handshake, so what is counted is connections accepted less handshakes
        that succeeded: a rank's own connection counts for the moment in between.
        """
        return self._unknown_frames + self._handshakes_missing

    def send(self, rank: int, kind: bytes, body: bytes | memoryview) -> None:
        """Queue one frame for `rank`.

        Raises:
            TransportError: the rank is not connected, or has stopped reading.
        """
        router, token = self._route[rank]
        try:
            router.send_multipart((token, kind, body), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise TransportError(f"rank {rank} cannot be reached: {error}") from error

    def poll(self, timeout: float | None) -> list[Frame]:
        """Wait until something arrives, `wake` is called, or `timeout` seconds passed; return what came from ranks."""
        ready = dict(self._poller.poll(None if timeout is None else max(0.0, timeout) * 1e3))
        if self._wake_receiver.fileno() in ready:
            self._drain_wake()
        if self._allow_list is not None and self._allow_list.socket in ready:
            self._allow_list.answer()
        for monitor in self._monitors:
            if monitor in ready:
                accepted = recv_monitor_message(monitor)["event"] == zmq.EVENT_ACCEPTED
                self._handshakes_missing += 1 if accepted else -1
        frames: list[Frame] = []
        for router in self._routers:
            if router in ready:
                self._receive(router, frames)
        return frames

    def wake(self) -> None:
        """Make a running or the next `poll` return at once. Thread-safe."""
        try:
            self._wake_sender.send(b"\0")
        except BlockingIOError:
            pass  # the pipe is full of wake-ups already
        except OSError:
            pass  # closed meanwhile: nobody is left to wake

    def close(self) -> None:
        """Close everything and remove the private directory. Safe to call twice."""
        for router in self._routers:
            router.disable_monitor()
        for monitor in self._monitors:
            monitor.close(0)
        for router in self._routers:
            router.close(0)
        self._routers, self._monitors = [], []
        if self._allow_list is not None:
            self._allow_list.close()
        self._context.term()
        self._wake_receiver.close()
        self._wake_sender.close()
        if self._directory is not None:
            self._directory.close()

    def _receive(self, router: zmq.Socket, frames: list[Frame]) -> None:
        while True:
            try:
                parts = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            rank = self._rank_of.get(parts[0])
            if rank is None or len(parts) != 3:
                self._unknown_frames += 1
                continue
            frames.append(Frame(rank, parts[1], parts[2]))

    def _drain_wake(self) -> None:
        try:
            while self._wake_receiver.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _bind_ipc(self) -> zmq.Socket:
        self._directory = IpcDirectory()
        return self._bind(f"ipc://{self._directory.path}/steps", None)

    def _bind_tcp(self, node_ip: str, keys: KeyPair, allowed: set[bytes]) -> zmq.Socket:
        self._allow_list = AllowList(self._context, allowed)
        self._poller.register(self._allow_list.socket, zmq.POLLIN)
        return self._bind(f"tcp://{node_ip}:*", keys)

    def _bind(self, endpoint: str, keys: KeyPair | None) -> zmq.Socket:
        router = self._context.socket(zmq.ROUTER)
        router.router_mandatory = True
        _set_options(router, tcp=keys is not None)
        if keys is not None:
            serve_with(router, keys)
        monitor = router.get_monitor_socket(_CONNECTION_EVENTS)
        self._routers.append(router)
        self._monitors.append(monitor)
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"cannot bind {endpoint}: {error}") from error
        self._poller.register(router, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        return router


def _set_options(sock: zmq.Socket, tcp: bool) -> None:
    sock.linger = 0
    sock.maxmsgsize = MAX_MESSAGE_BYTES
    if tcp:
        sock.heartbeat_ivl = HEARTBEAT_INTERVAL_MS
        sock.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
        sock.heartbeat_ttl = HEARTBEAT_TIMEOUT_MS


class RankPort:
    """A rank's end: one DEALER for all that its main loop says and hears, and for rank 0 one more for results."""

    def __init__(self, address: RankAddress) -> None:
        self.address = address
        self._context = zmq.Context()
        self._dealer = self._make_socket(address.token)
        self._losses = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._dealer.connect(address.endpoint)

    def watch_driver(self, on_lost: Callable[[], None]) -> None:
        """Call `on_lost` from a thread of its own when the connection breaks: the driver or its node is gone.

        The main thread may sit in a collective then, so the callback should end the process.
        """

        def watch() -> None:
            recv_monitor_message(self._losses)
            on_lost()

        threading.Thread(target=watch, name="driver-watch", daemon=True).start()

    def send(self, message: messages.Message) -> None:
        self._dealer.send_multipart((messages.CONTROL, messages.encode(message)))

    def receive(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        """The next (kind, body) from the driver; waits `timeout` seconds, for ever if None.

        Raises:
            TransportError: nothing came in time.
        """
        if timeout is not None and not self._dealer.poll(max(0.0, timeout) * 1e3):
            raise TransportError(f"nothing heard from the driver at {self.address.endpoint} for {timeout:.0f} s")
        kind, body = self._dealer.recv_multipart()
        return kind, body

    def result_socket(self) -> zmq.Socket:
        """A second DEALER, for the thread that sends results: threads must not share a ZeroMQ socket."""
        dealer = self._make_socket(self.address.result_token)
        dealer.connect(self.address.endpoint)
        return dealer

    def close(self, linger: float) -> None:
        """Stop talking; what was sent may take `linger` seconds to leave. The process is expected to end soon."""
        self._dealer.close(int(linger * 1e3))

    def _make_socket(self, token: bytes) -> zmq.Socket:
        dealer = self._context.socket(zmq.DEALER)
        dealer.routing_id = token
        _set_options(dealer, tcp=self.address.keys is not None)
        if self.address.keys is not None:
            connect_with(dealer, self.address.keys, self.address.server_key)
        return dealer
