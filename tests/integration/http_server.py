"""A real server for the HTTP tests: Serve on the Ray of this process, the default model, one rank on CPU."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config import EngineConfig
from cluster.serve.app import make_app

MODEL = "SmolLM2-135M-Instruct"
CONFIG = {
    "device": "cpu",
    "page_size": 16,
    "num_pages": 512,
    "max_running_requests": 16,
    "max_seq_len": 1024,
    "max_step_tokens": 256,
    "integrity_interval": 1,
}


@dataclass(frozen=True)
class Server:
    """Address of a running server, and its engine deployment for looking inside."""

    url: str
    engine: DeploymentHandle

    def client(self, timeout: float = 60.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """POST as JSON, or whatever `options` say."""
        if body is not None:
            options["json"] = body
        with self.client() as client:
            return client.post(path, **options)

    def get(self, path: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path)

    def stats(self) -> dict[str, Any]:
        return self.engine.status.remote().result(timeout_s=60)["stats"]

    def wait_idle(self, seconds: float = 60.0) -> dict[str, Any]:
        """Wait until nothing runs; check that every page is free or in the prefix tree. Returns the stats."""
        until(lambda: self.stats()["running"] == self.stats()["waiting"] == 0, seconds)
        stats = self.stats()
        assert stats["free_pages"] + stats["cached_pages"] == stats["total_pages"], stats
        return stats


def until(condition, seconds: float) -> float:
    """Wait for `condition`; returns the seconds it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"did not happen within {seconds:g} s"
        time.sleep(0.02)
    return time.monotonic() - start


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running_server(engine: dict[str, Any] | None = None, **config: Any) -> Iterator[Server]:
    """Start a server with CONFIG and these settings, and Serve's options for the engine; take everything down at the
    end."""
    port = free_port()
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        settings = EngineConfig.parse(CONFIG | {"spare_ranks": False} | config)
        serve.run(make_app(settings, engine), name="test", route_prefix="/")
        server = Server(f"http://127.0.0.1:{port}", serve.get_deployment_handle("engine", "test"))
        until(lambda: server.get("/ready").status_code == 200, 120)
        yield server
    finally:
        serve.shutdown()


def events(response: httpx.Response) -> Iterator[str]:
    """The payloads of a server-sent event stream."""
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: "), line
            yield line.removeprefix("data: ")
