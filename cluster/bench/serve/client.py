"""One streaming request to an OpenAI endpoint, and when its parts came."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from cluster.errors import ConfigError

MAX_ERROR_TEXT = 300  # characters of a server's message that are kept


@dataclass(slots=True)
class Call:
    """A request as its user saw it. Times are `time.perf_counter()` seconds; `chunks`: when each piece of text came.

    Token counts are the server's; `output_tokens` is the number of chunks where it tells none.
    """

    session: int
    turn: int
    due: float
    started: float = 0.0
    ended: float = 0.0
    chunks: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


class Endpoint:
    """A server. Use it as an async context manager.

    Args:
        url: with or without the path `/v1`.
        kind: "completions" or "chat".
        model: None: the first that the server lists.
        extra: further members of each request's body.
        timeout: seconds a request may take.
    """

    def __init__(
        self, url: str, kind: str, model: str | None, api_key: str | None, extra: dict[str, Any], timeout: float
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._chat = kind == "chat"
        self._path = self.url + ("/v1/chat/completions" if self._chat else "/v1/completions")
        self._extra = {"stream": True, "stream_options": {"include_usage": True}, **extra}
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout)

    async def __aenter__(self) -> Endpoint:
        """Raises ConfigError if the server does not answer, or lists no model where none was given."""
        self._http = aiohttp.ClientSession(
            headers=self._headers, timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0)
        )
        if self.model is None:
            try:
                self.model = await self._first_model()
            except BaseException:
                await self._http.close()
                raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.close()

    async def _first_model(self) -> str:
        try:
            async with self._http.get(self.url + "/v1/models") as response:
                if response.status != 200:
                    raise ConfigError(f"{self.url}/v1/models answers {await _refusal(response)}; give --model")
                return (await response.json())["data"][0]["id"]
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise ConfigError(f"no server answers at {self.url}: {error or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{self.url}/v1/models lists no model; give --model") from error

    async def run(self, call: Call, messages: list[tuple[str, str]], output_len: int) -> None:
        """Send the request made of (role, text) messages and fill in `call`; what goes wrong is its `error`."""
        call.started = time.perf_counter()
        try:
            async with self._http.post(self._path, json=self._body(messages, output_len)) as response:
                if response.status == 200:
                    await self._read(call, response)
                else:
                    call.error = await _refusal(response)
        except asyncio.TimeoutError:
            call.error = f"no end within {self._timeout.total:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            call.error = f"{type(error).__name__}: {error}"[:MAX_ERROR_TEXT]
        call.ended = time.perf_counter()

    def _body(self, messages: list[tuple[str, str]], output_len: int) -> dict[str, Any]:
        if self._chat:
            prompt: dict[str, Any] = {"messages": [{"role": role, "content": text} for role, text in messages]}
        else:
            prompt = {"prompt": "".join(text for _, text in messages)}
        return {"model": self.model, **prompt, "max_tokens": output_len, **self._extra}

    async def _read(self, call: Call, response: aiohttp.ClientResponse) -> None:
        rest, pieces, finished = b"", [], False
        async for data in response.content.iter_any():
            now = time.perf_counter()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    finished = True
                    continue
                event = json.loads(payload)
                if "error" in event:
                    call.error = f"in the stream: {_message(event)}"
                    return
                for choice in event.get("choices") or ():
                    finished |= choice.get("finish_reason") is not None
                    text = self._text(choice)
                    if text:
                        pieces.append(text)
                        call.chunks.append(now)
                if usage := event.get("usage"):
                    _count(call, usage)
        call.text = "".join(pieces)
        call.output_tokens = call.output_tokens or len(call.chunks)
        if not finished:
            call.error = "the stream ended early"

    def _text(self, choice: dict[str, Any]) -> str:
        if not self._chat:
            return choice.get("text") or ""
        delta = choice.get("delta") or {}
        return (delta.get("reasoning_content") or "") + (delta.get("content") or "")


def _count(call: Call, usage: dict[str, Any]) -> None:
    call.prompt_tokens = usage.get("prompt_tokens") or 0
    call.output_tokens = usage.get("completion_tokens") or 0
    call.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def _refusal(response: aiohttp.ClientResponse) -> str:
    """Status and message of an answer that is not 200."""
    text = await response.text(errors="replace")
    try:
        return f"{response.status} {_message(json.loads(text))}"
    except ValueError:
        return f"{response.status} {text[:MAX_ERROR_TEXT]}"


def _message(body: Any) -> str:
    """The message in an OpenAI error, or the whole of something else."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:MAX_ERROR_TEXT]
