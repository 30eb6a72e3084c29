"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

_START_TIMEOUT = 60.0
_CALL_TIMEOUT = 60.0


def find_chromium() -> str | None:
    """The program's path; None if none is installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """One tab. `complaints` are errors of the console and uncaught exceptions."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                self._calls.pop(data["id"]).set_result(data)
            elif data["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(data["params"]["exceptionDetails"]))
            elif data["method"] == "Log.entryAdded" and data["params"]["entry"]["level"] == "error":
                self.complaints.append(str(data["params"]["entry"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command of the protocol. Raises RuntimeError if Chromium refuses it."""
        number = next(self._numbers)
        self._calls[number] = asyncio.get_running_loop().create_future()
        answer = self._calls[number]
        await self._socket.send_json({"id": number, "method": method, "params": params})
        data = await asyncio.wait_for(answer, _CALL_TIMEOUT)
        if "error" in data:
            raise RuntimeError(f"{method}: {data['error']}")
        return data["result"]

    async def open(self, url: str, width: int, height: int, dark: bool = False) -> None:
        """Load a page on a screen of this size; narrower than 600 is a phone."""
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        phone = width < 600
        scale = 2 if phone else 1
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await self.call("Page.navigate", url=url)
        await self.until("location.href != 'about:blank' && document.readyState == 'complete'", 60)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression. Raises RuntimeError if it throws."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float) -> None:
        """Wait until the expression is true."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not await self.evaluate(expression):
            assert asyncio.get_running_loop().time() < deadline, f"not within {seconds:g} s: {expression}"
            await asyncio.sleep(0.2)

    async def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write what is seen, or the `whole` page, as a PNG."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))


@asynccontextmanager
async def chromium() -> AsyncIterator[Page]:
    """A browser with one empty tab, gone afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            find_chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with aiohttp.ClientSession() as session:
                tab = await _tab(session, Path(profile))
                socket = await session.ws_connect(tab, max_msg_size=64 << 20)
                yield Page(socket)
        finally:
            process.terminate()
            await process.wait()


async def _tab(session: aiohttp.ClientSession, profile: Path) -> str:
    """Address of the first tab. Chromium writes its port into its profile."""
    deadline = asyncio.get_running_loop().time() + _START_TIMEOUT
    while True:
        try:
            port = (profile / "DevToolsActivePort").read_text().split()[0]
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                return next(each["webSocketDebuggerUrl"] for each in await answer.json() if each["type"] == "page")
        except (OSError, IndexError, StopIteration, aiohttp.ClientError):
            assert asyncio.get_running_loop().time() < deadline, "Chromium did not start"
            await asyncio.sleep(0.1)
