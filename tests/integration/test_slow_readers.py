"""Clients that ask and read nothing, behind Serve's HTTP proxy, which takes everything that the ingress sends them."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack

import httpx
import psutil
import pytest

from tests.integration.http_server import running_server, until

CLIENTS, MOST = 8, 8_000
BYTES_PER_TOKEN = 600  # of an event, with what the proxy holds around it


def proxy_memory() -> int:
    """Resident bytes of Serve's HTTP proxies of this process's Ray."""
    found = [
        process.memory_info().rss
        for process in psutil.Process().children(recursive=True)
        if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::ProxyActor")
    ]
    assert found
    return sum(found)


@pytest.mark.full_grid
def test_they_cost_at_most_their_text_and_hold_up_nobody(private_ray):
    settings = {"device": "fake", "max_output_tokens": MOST, "num_pages": 8192, "slow_reader_timeout": 5}
    with running_server(**settings) as server, ExitStack() as stack:
        path = "/v1/completions"
        refused = server.post(path, {"prompt": "a", "max_tokens": 1000, "n": 9})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")

        body = {"prompt": "a", "max_tokens": MOST // 8, "n": 8, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nContent-Type: application/json\r\n\r\n"
        )
        before = proxy_memory()
        for _ in range(CLIENTS):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", httpx.URL(server.url).port))
            client.sendall(head.encode() + data)
        until(lambda: server.get("/health").json()["open_streams"] > 0, 60)
        answer = server.post(path, {"prompt": "b", "max_tokens": 64, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 64
        until(lambda: server.get("/health").json()["open_streams"] == 0, 120)  # though nobody has read
        assert proxy_memory() - before < CLIENTS * MOST * BYTES_PER_TOKEN
        server.wait_idle()
        stack.close()
        assert server.post(path, {"prompt": "c", "max_tokens": 4, "ignore_eos": True}).status_code == 200
