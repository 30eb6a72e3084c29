"""Who gets past the gate, and what reads a request's body."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI
from ray.exceptions import TaskCancelledError
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from cluster.config import EngineConfig
from cluster.serve.gate import OPEN_PATHS, Gate, Rules


def read(*messages, max_body_bytes: int = 10) -> list[dict]:
    arriving = iter(messages)

    async def receive() -> dict:
        message = next(arriving)
        if isinstance(message, Exception):
            raise message
        return message

    limited = Rules(EngineConfig(max_body_bytes=max_body_bytes)).limited(receive)

    async def run() -> list[dict]:
        return [await limited() for _ in messages]

    return asyncio.run(run())


def part(size: int) -> dict:
    return {"type": "http.request", "body": b"x" * size, "more_body": True}


def test_a_cancelled_read_is_a_disconnect():
    assert read(part(3), TaskCancelledError()) == [part(3), {"type": "http.disconnect"}]


def test_a_body_that_grows_too_large_is_refused():
    assert read(part(5), part(5)) == [part(5), part(5)]
    with pytest.raises(HTTPException) as caught:
        read(part(5), part(6))
    assert caught.value.status_code == 413


def gated(prefix: str) -> TestClient:
    """An application behind `prefix` whose gate wants a key; each route answers with its own name."""
    app = FastAPI()
    app.add_middleware(Gate)
    app.state.rules = Rules(EngineConfig(api_key=["k"]))

    @app.get("/{path:path}")
    async def answer(path: str) -> str:
        return f"/{path}"

    return TestClient(app, root_path=prefix, raise_server_exceptions=False)


@pytest.mark.parametrize("prefix", ["", "/llm", "/a/b", "/health", "/v1"])
def test_the_open_paths_need_no_key_behind_any_prefix(prefix):
    client = gated(prefix)
    for path in OPEN_PATHS:
        assert client.get(prefix + path).json() == path
    for path in ("/v1/models", "/dashboard/state", "/openapi.json", "/health/x"):
        assert client.get(prefix + path).status_code == 401
        assert client.get(prefix + path, headers={"authorization": "Bearer k"}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/llm",
        "/llm/",
        "/llm/llm/health",
        "/llm/health/",
        "/llm//health",
        "/llm/health/..%2fv1/models",
        "/llm/health/%2e%2e/v1/models",
        "/llm/v1/%2e%2e/health",
        "/llm/v1/models%3f/health",
        "/llmhealth",
        "/LLM/health",
    ],
)
def test_what_only_looks_like_an_open_path_needs_a_key(path):
    assert gated("/llm").get(path).status_code == 401
