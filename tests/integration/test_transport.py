"""Sockets between driver and ranks, without Ray: round trips, strangers, losses, and what is left behind."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from cluster import messages
from cluster.errors import TransportError
from cluster.transport import DriverTransport, Frame, RankPort

LOCALITY = {"ipc": [True, True], "tcp": [False, False], "mixed": [True, False]}


@pytest.fixture(params=LOCALITY)
def driver(request: pytest.FixtureRequest) -> Iterator[DriverTransport]:
    transport = DriverTransport(LOCALITY[request.param], "127.0.0.1")
    yield transport
    transport.close()


def poll_until(driver: DriverTransport, done: Callable[[list[Frame]], bool], timeout: float = 60.0) -> list[Frame]:
    """Poll until `done(all frames so far)`."""
    frames: list[Frame] = []
    deadline = time.monotonic() + timeout
    while not done(frames):
        assert time.monotonic() < deadline, f"gave up; frames so far: {frames}"
        frames += driver.poll(0.1)
    return frames


def connect(driver: DriverTransport) -> list[RankPort]:
    """A port per rank, each known to the driver."""
    ports = [RankPort(address) for address in driver.addresses]
    for rank, port in enumerate(ports):
        port.send(messages.Hello(messages.PROTOCOL_VERSION, "g", rank))
    frames = poll_until(driver, lambda frames: len(frames) == len(ports))
    assert sorted(frame.rank for frame in frames) == list(range(len(ports)))
    return ports


def endpoints(driver: DriverTransport, scheme: str) -> list[str]:
    return [address.endpoint for address in driver.addresses if address.endpoint.startswith(scheme)]


def test_frames_go_both_ways_and_are_not_changed(driver: DriverTransport) -> None:
    ports = connect(driver)
    body = os.urandom(1 << 20)
    for rank in range(2):
        driver.send(rank, messages.PLAN, body)
    assert [port.receive(10.0) for port in ports] == [(messages.PLAN, body)] * 2
    results = ports[0].result_socket()
    results.send_multipart((messages.RESULT, b"tokens"))
    assert poll_until(driver, bool) == [Frame(0, messages.RESULT, b"tokens")]
    poll_until(driver, lambda _: driver.strangers == 0)


def test_wake_ends_a_poll_from_another_thread(driver: DriverTransport) -> None:
    timer = threading.Timer(0.1, driver.wake)
    timer.start()
    assert driver.poll(600.0) == []  # the test's own timeout comes long before


def test_sending_to_a_rank_that_is_not_there_fails_at_once(driver: DriverTransport) -> None:
    with pytest.raises(TransportError, match="rank 1 cannot be reached"):
        driver.send(1, messages.PLAN, b"")


def test_receive_has_a_deadline(driver: DriverTransport) -> None:
    port = RankPort(driver.addresses[0])
    with pytest.raises(TransportError, match="nothing heard from the driver"):
        port.receive(0.05)


def test_a_rank_notices_that_the_driver_is_gone() -> None:
    for local in (True, False):
        driver = DriverTransport([local], "127.0.0.1")
        lost = threading.Event()
        port = RankPort(driver.addresses[0])
        port.send(messages.Stop())
        poll_until(driver, bool)
        port.watch_driver(lost.set)
        assert not lost.wait(0.2)
        driver.close()
        assert lost.wait(5.0)


def test_ipc_directory_is_private_and_goes_away() -> None:
    driver = DriverTransport([True], "127.0.0.1")
    directory = Path(driver.addresses[0].endpoint.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    driver.close()
    assert not directory.exists()


def test_a_stranger_on_ipc_is_dropped_and_counted() -> None:
    driver = DriverTransport([True], "127.0.0.1")
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(driver.addresses[0].endpoint)
    for frames in ([b"P", b"x"], [messages.RESULT, b"\0" * 64], [b""], [b"a"] * 9):
        stranger.send_multipart(frames)
    poll_until(driver, lambda _: driver.strangers == 4)
    context.destroy(0)
    driver.close()


def test_strangers_on_tcp_are_dropped_and_counted() -> None:
    driver = DriverTransport([False, False], "127.0.0.1")
    connect(driver)
    address = driver.addresses[0]
    context = zmq.Context()

    plain = context.socket(zmq.DEALER)  # no CURVE
    plain.connect(address.endpoint)
    plain.send(b"x")
    poll_until(driver, lambda _: driver.strangers >= 1)
    plain.close(0)

    before = driver.strangers
    unknown = context.socket(zmq.DEALER)  # CURVE, even the driver's public key, but a key pair of its own
    unknown.curve_publickey, unknown.curve_secretkey = zmq.curve_keypair()
    unknown.curve_serverkey = address.server_key
    unknown.routing_id = address.token
    unknown.connect(address.endpoint)
    unknown.send_multipart([messages.RESULT, b"x"])
    poll_until(driver, lambda _: driver.strangers > before)
    unknown.close(0)

    before = driver.strangers
    host, port = address.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:  # not ZeroMQ at all
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + os.urandom(4096))
        poll_until(driver, lambda _: driver.strangers > before)
    context.destroy(0)
    driver.close()


def test_keys_do_not_show_in_logs(driver: DriverTransport) -> None:
    for address in driver.addresses:
        shown = repr(address)
        assert address.token.hex() not in shown and repr(address.token) not in shown
        if address.keys is not None:
            assert address.keys.secret.decode() not in shown + repr(address.keys)
