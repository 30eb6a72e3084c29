"""Server-sent events as OpenAI sends them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from cluster.serve.errors import problem_of

logger = logging.getLogger(__name__)

DONE = "data: [DONE]\n\n"


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def to_json(value: object) -> str:
    """Compact JSON in plain ASCII-safe UTF-8: characters stay themselves."""
    return _encode(value)


def event(payload: str) -> str:
    """One event with a JSON payload."""
    return f"data: {payload}\n\n"


class EventStream(StreamingResponse):
    """Streams texts of one or more events, each in one write; `on_close` runs when the answer ends in any way, also
    when the client leaves.

    A client that takes nothing for `read_timeout` seconds, while the server's buffer for it is full, loses the stream.
    """

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None], read_timeout: float) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_with_errors(events), media_type="text/event-stream", headers=headers)
        self._on_close = on_close
        self._read_timeout = read_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = ReaderWatch(receive, send, self._read_timeout)
        try:
            await self.stream_response(watch.send)
        except asyncio.CancelledError:
            if watch.too_slow:
                logger.warning("a client read nothing for %g s; its stream is closed", self._read_timeout)
            elif not watch.left:
                raise
        finally:
            watch.stop()
            self._on_close()


class ReaderWatch:
    """Cancels the current task when the client leaves, or one `send` takes longer than `timeout` seconds.

    One timer for the whole stream instead of one per chunk, and none of Starlette's task groups.
    """

    def __init__(self, receive: Receive, send: Send, timeout: float) -> None:
        self.too_slow = self.left = False
        self._receive = receive
        self._send = send
        self._timeout = timeout
        self._task = asyncio.current_task()
        self._sending_since: float | None = None
        self._timer = asyncio.get_running_loop().call_later(timeout, self._check)
        self._listener = asyncio.create_task(self._listen())

    async def send(self, message: Message) -> None:
        self._sending_since = time.monotonic()
        await self._send(message)
        self._sending_since = None

    def stop(self) -> None:
        self._timer.cancel()
        self._listener.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left = True
        self._task.cancel()

    def _check(self) -> None:
        since = self._sending_since
        left = self._timeout if since is None else since + self._timeout - time.monotonic()
        if left <= 0:
            self.too_slow = True
            self._task.cancel()
        else:
            self._timer = asyncio.get_running_loop().call_later(left, self._check)


async def _with_errors(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The status line is gone once a stream has begun, so an error becomes its last event."""
    try:
        async for item in events:
            yield item
    except Exception as error:
        yield event(to_json(problem_of(error).body))
