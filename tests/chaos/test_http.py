"""Over HTTP: a stream survives the kill -9 of a rank; readiness and metrics tell what happens meanwhile."""

from __future__ import annotations

import json
import os
import signal
import threading

import psutil
import pytest

from tests.integration.http_server import events, running_server, until

pytestmark = [pytest.mark.usefixtures("private_ray"), pytest.mark.timeout(600)]
BODY = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 11}], ids=["greedy", "seeded"])
def test_a_stream_survives_the_kill_of_its_rank(server, sampling: dict) -> None:
    body = BODY | sampling
    expected = server.post("/v1/completions", body).json()
    before = recoveries(server)
    pid = server.engine.info.remote().result(timeout_s=30)["ranks"][0]["pid"]
    waiting = []
    other = threading.Thread(target=lambda: waiting.append(post_patiently(server, body)))
    other.start()
    with (
        server.client(timeout=300) as client,
        client.stream(
            "POST", "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
        ) as response,
    ):
        stream = events(response)
        text = "".join(json.loads(next(stream))["choices"][0]["text"] for _ in range(5))
        os.kill(pid, signal.SIGKILL)
        until(lambda: server.get("/ready").status_code == 503, 10)
        answer = server.get("/ready").json()["error"]
        assert "being started again" in answer["message"] and f"pid {pid}" in answer["message"]
        assert server.get("/health").status_code == 200
        *chunks, usage, done = stream
    text += "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
    assert done == "[DONE]"
    assert text == expected["choices"][0]["text"]
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
    assert json.loads(usage)["usage"]["completion_tokens"] == 200
    other.join(300)
    assert waiting[0].json()["choices"] == expected["choices"]
    assert server.get("/ready").status_code == 200
    assert recoveries(server) == before + 1
    assert not psutil.pid_exists(pid)


@pytest.fixture(scope="module")
def server(private_ray):
    with running_server() as server:
        yield server


def recoveries(server) -> int:
    return server.engine.metrics.remote().result(timeout_s=30)["recoveries"]


def post_patiently(server, body: dict):
    with server.client(timeout=300) as client:
        return client.post("/v1/completions", json=body)
