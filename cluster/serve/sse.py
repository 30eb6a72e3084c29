"""Server-sent events as OpenAI sends them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.serve.errors import problem_of

DONE = "data: [DONE]\n\n"


def to_json(value: object) -> str:
    """Compact JSON in plain ASCII-safe UTF-8: characters stay themselves."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def event(payload: str) -> str:
    """One event with a JSON payload."""
    return f"data: {payload}\n\n"


class EventStream(StreamingResponse):
    """Streams events; `on_close` runs when the answer ends in any way, also when the client leaves."""

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_with_errors(events), media_type="text/event-stream", headers=headers)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


async def _with_errors(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The status line is gone once a stream has begun, so an error becomes its last event."""
    try:
        async for item in events:
            yield item
    except Exception as error:
        yield event(to_json(problem_of(error).body))
