"""What an ingress of several models says while some are loading."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from cluster.config import EngineConfig
from cluster.errors import NotReadyError
from cluster.serve.answers import ModelCard
from cluster.serve.metrics import IngressMetrics, render
from cluster.serve.models import Models


class Loading:
    """An engine that never says that it is up."""

    def __init__(self) -> None:
        self.info = self

    def remote(self) -> asyncio.Future:
        return asyncio.get_running_loop().create_future()


@pytest.fixture
async def models() -> Models:
    return Models([Loading(), Loading()], [EngineConfig(served_model_name=name) for name in ("one", "two")])


async def test_the_others_are_told_of(models: Models) -> None:
    card = ModelCard(id="two", created=0, max_model_len=8)
    models.all[1].loaded = SimpleNamespace(card=card, engine=SimpleNamespace(metrics=IngressMetrics()))
    assert models.cards == [card]
    seen = models.client_metrics()
    assert seen.keys() == {"two"}
    text = render(models.metrics({"i0": seen | {"replica": "i0"}, "i1": {"replica": "i1"}}, [{}, {}])).decode()
    assert 'raydix_engine_up{model_name="one"} 0.0' in text
    assert 'raydix_time_to_first_token_seconds_count{ingress="i0",model_name="two"} 0.0' in text


async def test_with_none_up_there_is_no_list_and_no_wait_for_metrics(models: Models) -> None:
    with pytest.raises(NotReadyError):
        models.cards  # noqa: B018
    assert 'raydix_engine_up{model_name="two"} 0.0' in render(models.metrics({"i0": {}}, [{}, {}])).decode()
