"""What reads a request's body."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import TaskCancelledError
from starlette.exceptions import HTTPException

from cluster.config import EngineConfig
from cluster.serve.gate import Rules


def read(*messages, max_body_bytes: int = 10) -> list[dict]:
    arriving = iter(messages)

    async def receive() -> dict:
        message = next(arriving)
        if isinstance(message, Exception):
            raise message
        return message

    limited = Rules(EngineConfig(max_body_bytes=max_body_bytes)).limited(receive)

    async def run() -> list[dict]:
        return [await limited() for _ in messages]

    return asyncio.run(run())


def part(size: int) -> dict:
    return {"type": "http.request", "body": b"x" * size, "more_body": True}


def test_a_cancelled_read_is_a_disconnect():
    assert read(part(3), TaskCancelledError()) == [part(3), {"type": "http.disconnect"}]


def test_a_body_that_grows_too_large_is_refused():
    assert read(part(5), part(5)) == [part(5), part(5)]
    with pytest.raises(HTTPException) as caught:
        read(part(5), part(6))
    assert caught.value.status_code == 413
