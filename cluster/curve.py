"""CURVE encryption for tcp sockets: keys made per group, and an allow-list of the clients that may connect.

The driver makes one key pair for itself and one per rank; a rank's pair reaches it as a Ray actor argument. libzmq asks
the allow-list about each client (ZAP, RFC 27) over an in-process socket that the driver polls with its other sockets.
"""

from __future__ import annotations

from dataclasses import dataclass

import zmq
from zmq.utils import z85

ZAP_ENDPOINT = "inproc://zeromq.zap.01"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in z85 (40 bytes each). The secret half does not show in logs."""

    public: bytes
    secret: bytes

    @classmethod
    def make(cls) -> KeyPair:
        return cls(*zmq.curve_keypair())

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def serve_with(socket: zmq.Socket, keys: KeyPair) -> None:
    """Make `socket` a CURVE server; call before bind."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.zap_domain = b"raydix"


def connect_with(socket: zmq.Socket, keys: KeyPair, server_public: bytes) -> None:
    """Make `socket` a CURVE client of the server with that public key; call before connect."""
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.curve_serverkey = server_public


class AllowList:
    """Answers libzmq's authentication requests for one context: only `allowed` public keys (z85) get in.

    `socket` is to be polled by the thread that owns the context's sockets, which calls `answer` when it is readable.
    """

    def __init__(self, context: zmq.Context, allowed: set[bytes]) -> None:
        self._allowed = allowed
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ENDPOINT)

    def answer(self) -> None:
        """Answer one waiting request. A ZAP request is version, id, domain, address, identity, mechanism, key."""
        frames = self.socket.recv_multipart()
        request_id = frames[1] if len(frames) > 1 else b""
        known = len(frames) == 7 and frames[5] == b"CURVE" and z85.encode(frames[6]) in self._allowed
        code, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        self.socket.send_multipart([b"1.0", request_id, code, text, b"", b""])

    def close(self) -> None:
        self.socket.close()
