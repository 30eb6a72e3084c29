"""Control messages between driver and ranks: msgpack maps with a checked schema. Nothing is ever unpickled.

A frame on the wire is one kind byte and a body: `PLAN` and `RESULT` carry the int32 buffers of `scheduler.step`,
`CONTROL` carries one of the messages below. Start-up, in order (rank -> driver unless noted)::

    Hello -> driver answers Welcome | Progress* | rank 0: Rendezvous, which the driver passes on to the other ranks
    Capacity -> driver answers Allocate with the smallest | Progress* | Ready

After that `Ping`/`Pong` probe an idle group, `Failed` may come at any time, and the driver ends with `Stop`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import msgpack

from cluster.errors import TransportError

PROTOCOL_VERSION = 1

PLAN, RESULT, CONTROL = b"P", b"R", b"C"


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank introduces itself; the driver refuses another protocol version, group or rank."""

    version: int
    group: str
    rank: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The driver's acknowledgement of `Hello`."""

    version: int
    group: str


@dataclass(frozen=True, slots=True)
class Progress:
    """A rank is in `phase`; `fraction` of it (0..1) is done."""

    phase: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where rank 0 holds the process group's store."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """KV pages that this rank's memory holds, and what the model is like."""

    pages: int
    vocab_size: int
    max_seq_len: int
    eos_token_ids: list[int]
    dtype: str


@dataclass(frozen=True, slots=True)
class Allocate:
    """KV pages every rank allocates: the smallest capacity, or what the user asked for."""

    pages: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank is warm. `graph_sizes`: batch sizes of its captured decode graphs, ascending."""

    graph_sizes: list[int]


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank gives up. `kind` is "model", "config" or "error"; the driver maps it to an error class."""

    phase: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for a collective and an answer: shows that all loops run, not only that the processes exist."""

    number: int


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to `Ping`."""

    number: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop and exit."""


Message = Hello | Welcome | Progress | Rendezvous | Capacity | Allocate | Ready | Failed | Ping | Pong | Stop

_TYPES: dict[str, type] = {cls.__name__: cls for cls in Message.__args__}
_FIELD_TYPES = {"int": int, "float": float, "str": str, "list[int]": list}
_SCHEMAS = {name: {f.name: _FIELD_TYPES[f.type] for f in fields(cls)} for name, cls in _TYPES.items()}


def encode(message: Message) -> bytes:
    """One msgpack map: the message's class name under "t", then its fields."""
    return msgpack.packb({"t": type(message).__name__, **asdict(message)})


def decode(body: bytes | memoryview) -> Message:
    """The message in `body`.

    Raises:
        TransportError: not msgpack, an unknown message, or fields that do not fit its schema.
    """
    try:
        values: Any = msgpack.unpackb(body)
        name = values.pop("t")
        schema = _SCHEMAS[name]
    except (ValueError, KeyError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise TransportError(f"not a control message: {error!r}") from error
    if values.keys() != schema.keys():
        raise TransportError(f"{name} message has fields {sorted(map(str, values))}, expected {sorted(schema)}")
    for field, kind in schema.items():
        if type(values[field]) is not kind or (kind is list and any(type(item) is not int for item in values[field])):
            raise TransportError(f"{name}.{field} must be {kind.__name__}, not {values[field]!r:.80}")
    return _TYPES[name](**values)
