"""`raydix serve --front haproxy`: the same answers, and a client that never reads loses its stream."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.integration.http_server import until
from tests.integration.test_cli import FRANCE, ServeProcess

FLAGS = ["--front", "haproxy", "--host", "0.0.0.0", "--device", "fake", "--num-pages", "8192", "--max-seq-len", "8192"]
FLAGS += ["--max-running-requests", "32", "--slow-reader-timeout", "3"]
CHOICES = 24  # of some 1.5 MB each: more than all buffers on the way hold


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    process = ServeProcess(*FLAGS)
    try:
        process.wait_ready()
        yield process
    finally:
        process.process.terminate()
        try:
            process.wait(60)
        finally:
            process.clear()


@pytest.mark.full_grid
def test_a_chat(server):
    body = {"messages": FRANCE, "max_tokens": 8, "stream": True}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200 and lines[-1] == "data: [DONE]" and len(lines) > 2


@pytest.mark.full_grid
def test_a_client_that_never_reads_loses_its_stream(server):
    body = {"prompt": "a", "max_tokens": 8000, "n": CHOICES, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"

    def streams() -> int:
        return httpx.get(server.url + "/health", timeout=60).json()["open_streams"]

    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(head.encode() + data)
        until(lambda: streams() > 0, 60)
        until(lambda: streams() == 0, 60)
    assert "a client read nothing for 3 s" in server.log
    answer = httpx.post(server.url + "/v1/completions", json={"prompt": "b", "max_tokens": 4}, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 4
