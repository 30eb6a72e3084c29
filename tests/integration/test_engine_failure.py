"""An engine that has failed for good beside one that has not: clients notice nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from ray import serve

from cluster.bench.serve.paths import free_port, wait_until_ready
from cluster.config import EngineConfig
from cluster.serve.app import make_app
from tests.integration.http_server import events

CONFIG = EngineConfig(
    device="fake", fake_tokens_per_s=200, num_pages=2048, max_seq_len=2048, max_recoveries=0, request_timeout=150
)


@pytest.fixture
def client(private_ray) -> Iterator[httpx.Client]:
    port = free_port()
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(make_app(CONFIG, {"num_replicas": 2}), name="failing", route_prefix="/")
        wait_until_ready(f"http://127.0.0.1:{port}")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=150) as client:
            yield client
    finally:
        serve.shutdown()


def kill_the_busy_engine() -> None:
    reports = serve.get_deployment_handle("engine", "failing").broadcast("report").results(timeout_s=60)
    (busy,) = (report for report in reports if report["metrics"]["running"])
    os.kill(busy["info"]["ranks"][0]["pid"], signal.SIGKILL)


def test_streams_and_new_requests_go_to_the_other(client: httpx.Client) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 1800, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with client.stream("POST", "/v1/completions", json=body) as response, ThreadPoolExecutor(8) as pool:
        stream = events(response)
        for _ in range(3):
            next(stream)
        kill_the_busy_engine()
        short = {"prompt": [8, 9], "max_tokens": 2, "ignore_eos": True}
        answers = list(pool.map(lambda _: client.post("/v1/completions", json=short), range(32)))
        rest = [json.loads(event) for event in stream if event != "[DONE]"]
    assert {answer.status_code for answer in answers} == {200}
    assert not any("error" in event for event in rest)
    assert rest[-1]["usage"]["completion_tokens"] == 1800
