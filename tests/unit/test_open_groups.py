"""An ingress's side of an engine, without Serve: what an error leaves behind, and when it cannot go on."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from cluster.config import EngineConfig
from cluster.errors import EngineError
from cluster.serve.engine_client import EngineClient
from cluster.serve.models import ServedModel
from cluster.serve.open_call import GroupOptions
from cluster.tokenizer import Tokenizer
from scheduler.sampling_params import SamplingParams
from tests.unit.tiny_tokenizers import byte_level


class Response:
    """Of a call that does not end until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled.set()

    def __await__(self):
        return self.cancelled.wait().__await__()


class Handle:
    """Serve's handle of an engine: takes `limit` calls."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.responses: list[Response] = []
        self.generate = SimpleNamespace(remote=self._call)

    def _call(self, *_: object, **__: object) -> Response:
        if len(self.responses) == self.limit:
            raise RecursionError("of what pickles the call")
        self.responses.append(Response())
        return self.responses[-1]


@pytest.fixture
async def make_client(tmp_path):
    clients = []

    def make(limit: int) -> tuple[EngineClient, Handle]:
        handle = Handle(limit)
        clients.append(EngineClient(handle, Tokenizer(byte_level(tmp_path)), "node", "127.0.0.1", EngineConfig()))
        return clients[-1], handle

    yield make
    for client in clients:
        client.close()


async def test_a_group_that_cannot_be_opened_leaves_nothing_behind(make_client):
    client, handle = make_client(limit=1)
    options = GroupOptions(time.monotonic(), timeout=3600.0)
    with pytest.raises(RecursionError):
        client.open([([1, 2], SamplingParams(max_tokens=4, seed=0))] * 2, options)
    assert client.open_streams == 0
    assert handle.responses[0].cancelled.is_set()
    assert not client._groups and not client._calls and not client._deadlines
    assert await client.drain(60.0) == 0


async def test_a_model_whose_tokens_cannot_arrive_is_not_healthy(make_client):
    client, _ = make_client(limit=0)
    model = SimpleNamespace(failure=None, loaded=None)
    ServedModel.check_health(model)
    model.loaded = SimpleNamespace(engine=client)
    ServedModel.check_health(model)
    client._receiver.close()
    with pytest.raises(EngineError, match="receives tokens"):
        ServedModel.check_health(model)
    model.failure = EngineError("no such model")
    with pytest.raises(EngineError, match="no such model"):
        ServedModel.check_health(model)
