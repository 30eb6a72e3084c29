"""The ingress's end of the side channel: one thread that receives every step message."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from cluster.curve import AllowList, KeyPair, serve_with
from cluster.errors import TransportError
from cluster.ipc_directory import IpcDirectory
from cluster.serve.replica_report import REPORT, ReplicaReport
from cluster.serve.side_channel import ReplyAddress, StepMessage

logger = logging.getLogger(__name__)


class StepReceiver:
    """Binds an ipc and a tcp socket, receives in its own thread, and calls `on_message` there once per message.

    `on_report` gets the reports of engine replicas, in the same thread.

    `address` is what an engine needs to send here.
    """

    def __init__(
        self,
        on_message: Callable[[StepMessage], None],
        node_id: str,
        node_ip: str,
        on_report: Callable[[ReplicaReport], None],
    ) -> None:
        self._on_message = on_message
        self._on_report = on_report
        self._dropped_messages = 0
        self._handshakes_missing = 0  # tcp connections accepted less handshakes that succeeded
        self._context = zmq.Context()
        server_keys, client_keys = KeyPair.make(), KeyPair.make()
        self._allow_list = AllowList(self._context, {client_keys.public})
        self._directory = IpcDirectory("raydix-ingress-")
        self._ipc = self._context.socket(zmq.PULL)
        self._ipc.bind(ipc := f"ipc://{self._directory.path / 'steps'}")
        self._tcp = self._context.socket(zmq.PULL)
        serve_with(self._tcp, server_keys)
        self._monitor = self._tcp.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        port = self._tcp.bind_to_random_port(f"tcp://{node_ip}")
        self._stop_receiving = self._context.socket(zmq.PAIR)
        self._stop_receiving.bind("inproc://stop")
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.connect("inproc://stop")
        self.address = ReplyAddress(
            name=secrets.token_hex(8),
            node_id=node_id,
            ipc=ipc,
            tcp=f"tcp://{node_ip}:{port}",
            secret=secrets.token_bytes(16),
            server_key=server_keys.public,
            client_keys=client_keys,
        )
        self._thread = threading.Thread(target=self._run, name="raydix-step-receiver", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Messages dropped and connections refused so far: strangers, or peers of another version.

        A connection counts from its acceptance to its good handshake, which strangers never get to.
        """
        return self._dropped_messages + self._handshakes_missing

    @property
    def alive(self) -> bool:
        """Whether the thread runs; without it nothing arrives."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread and remove the sockets and their directory."""
        if self.alive:
            self._stop.send(b"")
            self._thread.join(timeout=5)
        self._context.destroy(linger=0)
        self._directory.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._allow_list.socket, self._monitor, self._ipc, self._tcp, self._stop_receiving):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = [socket for socket, _ in poller.poll()]
            if self._stop_receiving in ready:
                return
            for socket in ready:
                if socket is self._allow_list.socket:
                    self._allow_list.answer()
                elif socket is self._monitor:
                    accepted = recv_monitor_message(socket)["event"] == zmq.EVENT_ACCEPTED
                    self._handshakes_missing += 1 if accepted else -1
                else:
                    self._receive(socket.recv_multipart())

    def _receive(self, frames: list[bytes]) -> None:
        try:
            self._take(frames)
        except TransportError as error:
            self._dropped_messages += 1
            logger.warning("dropped a message on the side channel (%d so far): %s", self._dropped_messages, error)
        except Exception:  # this thread serves every stream: it must outlive one bad message
            logger.exception("cannot handle a message on the side channel")

    def _take(self, frames: list[bytes]) -> None:
        secret = self.address.secret
        if len(frames) == 2 and frames[0] == REPORT:
            self._on_report(ReplicaReport.decode(frames[1], secret))
        elif len(frames) == 1:
            self._on_message(StepMessage.decode(frames[0], secret))
        else:
            raise TransportError(f"step message of {len(frames)} frames")
