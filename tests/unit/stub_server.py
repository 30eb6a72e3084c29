"""A tiny OpenAI-like HTTP server on asyncio: answers are scripted, requests are kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = tuple[int, list[bytes]]  # status, and the pieces of the body, sent one by one


@dataclass
class Stub:
    """`script(path, body)` answers a POST; GET lists one model."""

    script: Callable[[str, dict[str, Any]], Answer]
    delay: float = 0.0  # seconds before each piece of an answer to a POST
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)  # path, headers, body
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                headers = {}
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    headers[name.lower()] = value.strip()
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                if method == "GET":
                    status, pieces = 200, [b'{"data": [{"id": "stub-model"}]}']
                else:
                    body = json.loads(raw)
                    self.requests.append((path, headers, body))
                    status, pieces = self.script(path, body)
                head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
                writer.write(head.encode())
                for piece in pieces:
                    await asyncio.sleep(self.delay if method == "POST" else 0)
                    writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
        except asyncio.CancelledError:  # the test is over, and its client left early
            pass
        finally:
            writer.close()


@asynccontextmanager
async def running(stub: Stub) -> AsyncIterator[Stub]:
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
    async with server:
        stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield stub


def event(body: Any) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"


def completion(*texts: str, prompt: int = 10, tokens: int | None = None, cached: int = 0) -> Answer:
    """A streamed text completion, with usage at its end."""
    pieces = [event({"choices": [{"index": 0, "text": text, "finish_reason": None}]}) for text in texts]
    pieces.append(event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
    usage = {"prompt_tokens": prompt, "completion_tokens": len(texts) if tokens is None else tokens}
    pieces.append(event({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}}}))
    return 200, [*pieces, event(b"[DONE]")]


def chat(*texts: str) -> Answer:
    """A streamed chat completion without usage."""
    deltas = [{"role": "assistant", "content": ""}, *({"content": text} for text in texts), {}]
    reasons = [None] * (len(deltas) - 1) + ["stop"]
    choices = [{"index": 0, "delta": d, "finish_reason": r} for d, r in zip(deltas, reasons, strict=True)]
    return 200, [*(event({"choices": [choice]}) for choice in choices), event(b"[DONE]")]
