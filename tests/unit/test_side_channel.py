"""The side channel: round trips, strangers, keys, and ingresses that go away."""

from __future__ import annotations

import asyncio
import os
import queue
import stat
import time
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq

from cluster.curve import KeyPair, connect_with
from cluster.errors import TransportError
from cluster.serve.replica_report import REPORT, ReplicaReport
from cluster.serve.side_channel import StepMessage
from cluster.serve.step_receiver import StepReceiver
from cluster.serve.step_sender import StepSender, join_request_id
from kvcache.digest import DigestChange
from scheduler.outputs import StepOutputs
from scheduler.step import LogprobBlock, SampledLogprobs

SECRET = b"s" * 16


def message(ids=(5, 9), tokens=(100, -1), finish=(0, 4), cached=(0, 16), errors=None):
    return StepMessage(
        b"channel",
        7,
        3,
        np.array(ids, dtype=np.int64),
        np.array(tokens, dtype=np.int32),
        np.array(finish, dtype=np.uint8),
        np.array(cached, dtype=np.int32),
        {9: "did not fit"} if errors is None else errors,
    )


def outputs(entries, step_id=1, errors=None):
    ids, tokens = zip(*entries, strict=True)
    n = len(entries)
    return StepOutputs(
        request_ids=np.array(ids, dtype=np.int64),
        tokens=np.array(tokens, dtype=np.int32),
        finish=np.zeros(n, dtype=np.uint8),
        cached_tokens=np.zeros(n, dtype=np.int32),
        step_id=step_id,
        errors=errors or {},
    )


@pytest.fixture
def receivers():
    made = []

    def make():
        received: queue.Queue[StepMessage] = queue.Queue()
        receiver = StepReceiver(received.put, "node-a", "127.0.0.1", received.put)
        made.append(receiver)
        return receiver, received

    yield make
    for receiver in made:
        receiver.close()


@pytest.fixture
def sender():
    sender = StepSender("node-a")
    yield sender
    sender.close()


def connect(sender, address, timeout=60.0):
    return asyncio.run(sender.connect(address, timeout))


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def test_round_trip():
    back = StepMessage.decode(message().encode(SECRET), SECRET)
    assert back.step_id == 3
    for name in ("stream_ids", "tokens", "finish", "cached_tokens"):
        np.testing.assert_array_equal(getattr(back, name), getattr(message(), name))
    assert back.errors == {9: "did not fit"}
    assert back.logprobs is None
    assert back.prompt_logprobs == {}


def block(rows, top=1):
    return LogprobBlock(np.arange(rows * (2 + 2 * top), dtype=np.int32).reshape(rows, -1))


def test_log_probabilities_go_to_their_streams(receivers, sender):
    first, second = receivers(), receivers()
    a, b = (connect(sender, receiver.address) for receiver, _ in (first, second))
    step = outputs([(join_request_id(*pair), 1) for pair in ((a, 1), (b, 1), (a, 2), (b, 2))])
    step.logprobs = SampledLogprobs(np.array([0, 2, 3], dtype=np.int32), block(3))
    step.prompt_logprobs = {join_request_id(b, 1): block(2, top=0)}
    sender.send(step)
    to_a, to_b = (received.get(timeout=60) for _, received in (first, second))
    assert to_a.logprobs.index.tolist() == [0, 1]
    np.testing.assert_array_equal(to_a.logprobs.block.words, block(3).words[:2])
    assert to_a.prompt_logprobs == {}
    assert to_b.logprobs.index.tolist() == [1]
    np.testing.assert_array_equal(to_b.logprobs.block.words, block(3).words[2:])
    np.testing.assert_array_equal(to_b.prompt_logprobs[1].words, block(2, top=0).words)


@pytest.mark.parametrize(
    ("scored", "prompts"),
    [
        ([b"", 1], {}),
        ([b"\0\0\0\0", 1, b""], {}),
        ([b"\7\0\0\0", 0, bytes(8)], {}),
        ([b"\0\0\0\0", 99, bytes(800)], {}),
        (None, {1: [0, b"123"]}),
        (None, {1: 5}),
        (None, []),
    ],
)
def test_malformed_log_probabilities(scored, prompts):
    parts = msgpack.unpackb(message().encode(SECRET), strict_map_key=False)
    with pytest.raises(TransportError, match="log probabilities"):
        StepMessage.decode(msgpack.packb([*parts[:10], scored, prompts]), SECRET)


def good_parts():
    return msgpack.unpackb(message().encode(SECRET), strict_map_key=False)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04\x95pickle",
        b"\x81\x90\x01",  # a map whose key is a list
        msgpack.packb({"version": 1}),
        msgpack.packb([1, 2, 3]),
        message().encode(SECRET)[:-3],
        message().encode(b"x" * 16),
        message(tokens=(-2, 0)).encode(SECRET),
        message(finish=(0, 77)).encode(SECRET),
        message(cached=(-1, 0)).encode(SECRET),
        message(tokens=(1,)).encode(SECRET),
        message(errors={9: 5}).encode(SECRET),
        *(msgpack.packb([*good_parts()[:at], None, *good_parts()[at + 1 :]]) for at in range(10)),
        msgpack.packb([*good_parts()[:6], b"abc", *good_parts()[7:]]),
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(TransportError):
        StepMessage.decode(data, SECRET)


def test_one_message_per_step_and_ingress(receivers, sender):
    (first, first_messages), (second, second_messages) = receivers(), receivers()
    a, b = connect(sender, first.address), connect(sender, second.address)
    step = [(join_request_id(a, 1), 11), (join_request_id(b, 1), 21), (join_request_id(a, 2), 12)]
    failed = {join_request_id(b, 1): "no room"}
    assert sender.send(outputs(step, errors=failed)) == []
    got = first_messages.get(timeout=60)
    assert (got.stream_ids.tolist(), got.tokens.tolist(), got.errors) == ([1, 2], [11, 12], {})
    got = second_messages.get(timeout=60)
    assert (got.stream_ids.tolist(), got.tokens.tolist(), got.errors) == ([1], [21], {1: "no room"})
    assert first_messages.empty()
    assert second_messages.empty()


def test_an_ingress_is_connected_once(receivers, sender):
    receiver, _ = receivers()

    async def three():
        return await asyncio.gather(*(sender.connect(receiver.address) for _ in range(3)))

    assert len(set(asyncio.run(three()))) == 1


def test_between_nodes_it_is_tcp(receivers):
    receiver, messages = receivers()
    sender = StepSender("node-b")
    try:
        channel = connect(sender, replace(receiver.address, ipc="ipc:///nowhere/steps"))
        sender.send(outputs([(join_request_id(channel, 4), 44)]))
        assert messages.get(timeout=60).tokens.tolist() == [44]
        until(lambda: receiver.dropped == 0)
    finally:
        sender.close()


@pytest.mark.parametrize("knows_server_key", [True, False])
def test_a_stranger_without_the_client_key_cannot_connect(receivers, knows_server_key):
    receiver, messages = receivers()
    server_key = receiver.address.server_key if knows_server_key else KeyPair.make().public
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.immediate, socket.linger = True, 0
        connect_with(socket, KeyPair.make(), server_key)
        socket.connect(receiver.address.tcp)
        until(lambda: receiver.dropped > 0)
        assert not socket.poll(0, zmq.POLLOUT)
    assert messages.empty()


def test_strangers_messages_are_counted_and_dropped(receivers, sender):
    receiver, messages = receivers()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 1000
        socket.connect(receiver.address.ipc)
        socket.send(b"\x80\x04K\x01.")
        socket.send(b"\x81\x90\x01")
        socket.send(message().encode(SECRET))  # well-formed, wrong secret
        socket.send_multipart([message().encode(receiver.address.secret), b"more"])
        until(lambda: receiver.dropped == 4)
    channel = connect(sender, receiver.address)
    sender.send(outputs([(join_request_id(channel, 1), 1)]))
    assert messages.get(timeout=60).tokens.tolist() == [1]


def test_the_socket_directory_is_private_and_goes_away(receivers):
    receiver, _ = receivers()
    directory = Path(receiver.address.ipc.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert directory.stat().st_uid == os.getuid()
    receiver.close()
    assert not directory.exists()


@pytest.mark.parametrize("node", ["node-a", "node-b"])
def test_a_gone_ingress_loses_its_requests_and_blocks_nobody(receivers, node):
    (gone, _), (alive, messages) = receivers(), receivers()
    sender = StepSender(node)
    try:
        a, b = connect(sender, gone.address), connect(sender, alive.address)
        gone.close()
        mine, other = join_request_id(a, 1), join_request_id(b, 2)
        lost: list[int] = []

        def lost_mine():
            lost.extend(sender.send(outputs([(mine, 1), (other, 2)])))
            return lost

        until(lost_mine)
        assert set(lost) == {mine}
        assert sender.send(outputs([(mine, 1)])) == [mine]
        assert messages.get(timeout=60).stream_ids.tolist() == [2]
    finally:
        sender.close()


def test_an_unreachable_ingress_is_an_error_within_the_deadline(receivers, sender):
    receiver, _ = receivers()
    address = receiver.address
    receiver.close()
    with pytest.raises(TransportError, match="cannot reach the ingress"):
        connect(sender, address, timeout=0.3)


def test_callbacks_and_codecs_that_fail_do_not_stop_the_receiver(sender, monkeypatch):
    received: queue.Queue[object] = queue.Queue()

    def fail_once(message):
        received.put(message)
        if received.qsize() == 1:
            raise RuntimeError("boom")

    receiver = StepReceiver(fail_once, "node-a", "127.0.0.1", fail_once)
    report = ReplicaReport("replica", 1, 64, DigestChange(True, *np.zeros((2, 0), dtype=np.uint64)), 0, False)
    decode = StepMessage.decode
    monkeypatch.setattr(StepMessage, "decode", lambda *_: {}[0])
    try:
        channel = connect(sender, receiver.address)
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(receiver.address.ipc)
            socket.send(b"what nobody foresaw")
            socket.send_multipart([REPORT, report.encode(receiver.address.secret)])
            until(lambda: received.qsize() == 1)
        monkeypatch.setattr(StepMessage, "decode", decode)
        sender.send(outputs([(join_request_id(channel, 1), 1)]))
        until(lambda: received.qsize() == 2)
        assert receiver.alive
    finally:
        receiver.close()
    assert not receiver.alive
