"""Event streams: errors inside, readers that leave, and readers that read nothing."""

from __future__ import annotations

import asyncio
import json

import pytest

from cluster.errors import EngineDeadError
from cluster.serve.sse import DONE, EventStream, event

SCOPE = {"type": "http", "asgi": {"spec_version": "2.4"}}


async def serve(stream, send):
    """The response as an ASGI server runs it; the client never leaves by itself."""
    await stream(SCOPE, asyncio.Event().wait, send)


async def numbers(count, error=None):
    for number in range(count):
        yield event(str(number))
        await asyncio.sleep(0)
    if error is not None:
        raise error
    yield DONE


async def test_an_error_is_the_last_event():
    sent, closed = [], []

    async def send(message):
        sent.append(message)

    await serve(EventStream(numbers(2, EngineDeadError("rank 1 died")), lambda: closed.append(True), 5), send)
    bodies = [message["body"].decode() for message in sent if message.get("body")]
    assert bodies[:2] == [event("0"), event("1")]
    assert json.loads(bodies[2].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert len(bodies) == 3
    assert closed == [True]


async def test_a_reader_that_takes_nothing_loses_the_stream():
    closed = []

    async def send(message):
        if message.get("body") == event("3").encode():
            await asyncio.Event().wait()

    await asyncio.wait_for(serve(EventStream(numbers(10), lambda: closed.append(True), 0.2), send), 60)
    assert closed == [True]


async def test_a_slow_reader_keeps_the_stream():
    sent, closed = [], []

    async def send(message):
        await asyncio.sleep(0.5)
        sent.append(message.get("body"))

    await serve(EventStream(numbers(10), lambda: closed.append(True), 4.0), send)  # all of it takes longer
    assert DONE.encode() in sent
    assert closed == [True]


async def test_the_cancellation_of_a_client_that_left_goes_on():
    closed = []

    async def send(message):
        await asyncio.sleep(0.01)

    task = asyncio.create_task(serve(EventStream(numbers(1000), lambda: closed.append(True), 5), send))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed == [True]


async def test_a_client_that_leaves_ends_the_stream():
    closed, left = [], asyncio.Event()

    async def receive():
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        await asyncio.sleep(0.01)

    task = asyncio.create_task(EventStream(numbers(10**6), lambda: closed.append(True), 5)(SCOPE, receive, send))
    await asyncio.sleep(0.05)
    left.set()
    await asyncio.wait_for(task, 60)
    assert closed == [True]
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if "_listen" in repr(task)]  # nobody listens any more
