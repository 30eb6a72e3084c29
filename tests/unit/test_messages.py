"""Control messages: round trip, and everything else refused."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import messages
from cluster.errors import TransportError

EXAMPLES = [
    messages.Hello(1, "g", 0),
    messages.Welcome(1, "g"),
    messages.Progress("load", 0.5),
    messages.Rendezvous("10.0.0.1", 1234),
    messages.Capacity(100, 32000, 4096, [1, 2], "float32"),
    messages.Allocate(10),
    messages.Ready([1, 2, 4]),
    messages.Failed("load", "model", "no such tensor"),
    messages.Ping(3),
    messages.Pong(3),
    messages.Stop(),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_round_trip(message: messages.Message) -> None:
    assert messages.decode(messages.encode(message)) == message


def test_every_message_has_an_example() -> None:
    assert {type(message) for message in EXAMPLES} == set(messages.Message.__args__)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb(3),
        msgpack.packb([]),
        msgpack.packb({}),
        msgpack.packb({"t": "Nonsense"}),
        msgpack.packb({"t": ["Hello"]}),
        msgpack.packb({"t": "Ping"}),
        msgpack.packb({"t": "Ping", "number": "3"}),
        msgpack.packb({"t": "Ping", "number": True}),
        msgpack.packb({"t": "Ping", "number": 3, "more": 1}),
        msgpack.packb({"t": "Ready", "graph_sizes": ["1"]}),
        messages.encode(messages.Hello(1, "g", 0))[:-1],
        messages.encode(messages.Stop()) + b"\0",
    ],
)
def test_what_is_not_a_message_is_refused(body: bytes) -> None:
    with pytest.raises(TransportError):
        messages.decode(body)


@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_else(body: bytes) -> None:
    with contextlib.suppress(TransportError):
        messages.decode(body)
