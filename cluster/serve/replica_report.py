"""What an engine replica tells every ingress of itself a few times a second, on the way its tokens take.

Frames: REPORT, and one msgpack array::

    [VERSION, secret, replica, sequence, block, full, added uint64[n], removed uint64[m], outstanding, unwell]

See `side_channel` for the way, and for who is believed.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import msgpack
import numpy as np

from cluster.errors import TransportError
from kvcache.digest import DigestChange

VERSION = 1
REPORT = b"report"  # the first of two frames; a step message has one frame
_HASH = np.dtype("<u8")
_TYPES = (str, int, int, bool, bytes, bytes, int, bool)


@dataclass(frozen=True)
class ReplicaReport:
    """One report. `sequence` counts those to one ingress: one that is missing makes later changes worthless.

    replica       the replica's unique id in Serve
    block         tokens per hash of its digest
    change        of its prefix cache, since the last report
    outstanding   tokens of work of requests that came from other ingresses, see `cluster.routing.work_of`
    unwell        its ranks are being started again, or its engine has failed
    """

    replica: str
    sequence: int
    block: int
    change: DigestChange
    outstanding: int
    unwell: bool

    def encode(self, secret: bytes) -> bytes:
        change = self.change
        arrays = [part.astype(_HASH, copy=False).tobytes() for part in (change.added, change.removed)]
        head = [VERSION, secret, self.replica, self.sequence, self.block, change.full]
        return msgpack.packb([*head, *arrays, self.outstanding, self.unwell])

    @classmethod
    def decode(cls, data: bytes, secret: bytes) -> ReplicaReport:
        """Raises TransportError for anything but a report of this version with this secret."""
        try:
            version, given, *parts = msgpack.unpackb(data)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise TransportError(f"not a report: {error}") from error
        if version != VERSION or not isinstance(given, bytes) or not secrets.compare_digest(given, secret):
            raise TransportError("a report of another version or with a wrong secret")
        if len(parts) != len(_TYPES) or not all(type(part) is kind for part, kind in zip(parts, _TYPES, strict=True)):
            raise TransportError("a report with parts of wrong types")
        replica, sequence, block, full, added, removed, outstanding, unwell = parts
        if block < 1 or outstanding < 0 or len(added) % _HASH.itemsize or len(removed) % _HASH.itemsize:
            raise TransportError("a report with values out of range")
        change = DigestChange(full, np.frombuffer(added, _HASH), np.frombuffer(removed, _HASH))
        return cls(replica, sequence, block, change, outstanding, unwell)
