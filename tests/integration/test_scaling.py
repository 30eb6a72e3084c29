"""Scale 0 -> 1 -> 3 -> 0 -> 1 under a load curve, without an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from ray import serve

from cluster.bench.serve.paths import free_port
from cluster.config import EngineConfig
from cluster.serve.app import make_app
from tests.integration.http_server import until

REQUESTS = 30  # of 456 tokens of work each
AUTOSCALING = {
    "min_replicas": 0,
    "max_replicas": 3,
    "initial_replicas": 0,
    "metrics_interval_s": 0.3,
    "look_back_period_s": 1.0,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 2.0,
    "downscale_to_zero_delay_s": 4.0,
    "policy": {
        "policy_function": "cluster.serve.autoscaling:OutstandingTokens",
        "policy_kwargs": {"target": 2000},
    },
}
CONFIG = EngineConfig(
    device="fake", fake_tokens_per_s=400, num_pages=2048, max_seq_len=2048, max_step_tokens=128, request_timeout=150
)


@pytest.fixture
def client(private_ray) -> Iterator[httpx.Client]:
    port = free_port()
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        engine = {"autoscaling_config": AUTOSCALING, "graceful_shutdown_timeout_s": 90}
        serve.run(make_app(CONFIG, engine), name="scaling", route_prefix="/")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=150) as client:
            yield client
    finally:
        serve.shutdown()


def replicas() -> int:
    engine = serve.status().applications["scaling"].deployments["engine"]
    return engine.replica_states.get("RUNNING", 0)


class Watch:
    """Notes every number of replicas there is."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._stop = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            count = replicas()
            if not self.seen or self.seen[-1] != count:
                self.seen.append(count)
                print(f"{time.monotonic() - self._began:5.1f} s: {count} replicas")

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(10)


def complete(client: httpx.Client, number: int) -> None:
    body = {"prompt": [number] * 200, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        text = "".join(answer.iter_text())
    assert text.endswith("data: [DONE]\n\n") and '"error":' not in text, text[-500:]


@pytest.mark.full_grid
def test_replicas_follow_the_load(client):
    until(lambda: client.get("/ready").status_code == 200, 120)  # an engine has told the ingress what the model is
    with Watch() as watch:
        follow(client)
    assert max(watch.seen) == 3 and watch.seen.count(0) >= 2, watch.seen


def follow(client: httpx.Client) -> None:
    until(lambda: replicas() == 0, 60)
    until(lambda: client.get("/ready").json().get("replicas") == 0, 60)
    for _ in range(15):  # questions wake nobody
        assert client.get("/ready").status_code == 200
        assert client.get("/metrics").status_code == 200
        time.sleep(0.2)
    assert replicas() == 0
    with ThreadPoolExecutor(REQUESTS) as pool:
        first = pool.submit(complete, client, 1)
        until(lambda: replicas() == 1, 60)
        rest = [pool.submit(complete, client, number) for number in range(2, REQUESTS)]
        until(lambda: replicas() == 3, 60)
        for each in (first, *rest):
            each.result(timeout=120)
    until(lambda: replicas() == 0, 90)
    complete(client, 1000)
