"""What a streamed answer writes, and in how many pieces: each write costs more than what it writes."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import EngineDeadError
from cluster.serve.service import event_texts
from cluster.serve.streams import StreamGroup
from cluster.serve.token_stream import Delta, TokenStream


def open_group(choices: int) -> StreamGroup:
    group = StreamGroup(lambda stream, last: None)
    for index in range(choices):
        group.add(TokenStream(index, None, group, index, 0.0))
    return group


def write(index: int, delta: Delta) -> str:
    return f"{index}{delta.text} "


def texts(group: StreamGroup, begin: str = "") -> asyncio.Queue:
    """The pieces as they are written; None at the end, an error where it breaks."""
    pieces: asyncio.Queue = asyncio.Queue()

    async def run() -> None:
        try:
            async for text in event_texts(begin, await anext(group), group, write, lambda: "end"):
                pieces.put_nowait(text)
            pieces.put_nowait(None)
        except EngineDeadError as error:
            pieces.put_nowait(error)

    pieces.task = asyncio.create_task(run())
    return pieces


async def test_a_step_is_one_write_and_the_last_brings_the_end():
    group = open_group(2)
    pieces = texts(group, "begin ")
    for stream in group.streams:
        group.deliver(stream, Delta("a"))
    assert await pieces.get() == "begin 0a 1a "
    group.deliver(group.streams[1], Delta("b"))
    assert await pieces.get() == "1b "  # waits for nothing
    for stream in group.streams:
        group.deliver(stream, Delta("c", finish_reason="stop"))
    assert await pieces.get() == "0c 1c end"
    assert await pieces.get() is None


async def test_what_came_before_an_error_is_written():
    group = open_group(2)
    pieces = texts(group)
    group.deliver(group.streams[0], Delta("a"))
    assert await pieces.get() == "0a "
    group.deliver(group.streams[0], Delta("b"))
    group.deliver(group.streams[1], Delta(error=EngineDeadError("rank 1 died")))
    assert await pieces.get() == "0b "
    assert isinstance(await pieces.get(), EngineDeadError)


@pytest.mark.parametrize("last", [Delta("a", finish_reason="length"), Delta(finish_reason="stop")])
async def test_an_answer_of_one_token_is_one_write(last):
    group = open_group(1)
    pieces = texts(group, "begin ")
    group.deliver(group.streams[0], last)
    assert await pieces.get() == f"begin 0{last.text} end"
    assert await pieces.get() is None
