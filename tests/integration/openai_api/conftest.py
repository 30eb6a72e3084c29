"""One server for all files here: the default model with a chat template that knows tools and reasoning."""

from __future__ import annotations

import httpx
import openai
import pytest

from cluster.default_model import ensure_default_model
from cluster.tokenizer import Tokenizer
from tests.integration.http_server import running_server
from tests.integration.openai_api.settings import KEYS, MODEL, TEMPLATE


@pytest.fixture(scope="package")
def model_path(tmp_path_factory):
    """The default model under another chat template."""
    path = tmp_path_factory.mktemp("model") / MODEL
    path.mkdir()
    for file in ensure_default_model().iterdir():
        (path / file.name).symlink_to(file)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="package")
def server(private_ray, model_path):
    settings = {
        "model": str(model_path),
        "api_key": KEYS,
        "max_body_bytes": 2_000_000,
        "cors_origin": ["https://app.example"],
        "request_timeout": 120,
    }
    with running_server(**settings) as server:
        yield server


@pytest.fixture(scope="package")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0, timeout=120)


@pytest.fixture(scope="package")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60, headers={"authorization": f"Bearer {KEYS[1]}"}) as http:
        yield http


@pytest.fixture(scope="package")
def tokenizer(model_path):
    return Tokenizer(model_path)
