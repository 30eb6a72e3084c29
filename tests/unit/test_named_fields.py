"""Which fields an error names: those that the client sent or lacks, and nothing of ours."""

from __future__ import annotations

import re

import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.testclient import TestClient

from cluster.errors import InvalidRequestError
from cluster.serve.errors import problem_of
from cluster.serve.gate import respond
from cluster.serve.protocol import ChatCompletionRequest, CompletionRequest

HELLO = [{"role": "user", "content": "hello"}]
JSON = {"type": "json_object"}
SCHEMA = {"type": "json_schema"}


def chat(**fields):
    return ChatCompletionRequest.model_validate({"messages": HELLO} | fields)


def completion(**fields):
    return CompletionRequest(prompt="hello", **fields)


@pytest.fixture(scope="module")
def client():
    """Validates the body of a chat as the ingress does."""
    app = FastAPI()
    app.add_exception_handler(RequestValidationError, lambda request, error: respond(problem_of(error)))

    @app.post("/")
    async def answer(body: ChatCompletionRequest) -> None: ...

    return TestClient(app)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (
            {"response_format": SCHEMA | {"json_schema": {"name": "a b", "schema": {}}}},
            ["response_format.json_schema.name"],
        ),
        ({"response_format": SCHEMA | {"json_schema": {"name": "a"}}}, ["response_format.json_schema.schema"]),
        ({"response_format": SCHEMA}, ["response_format.json_schema"]),
        ({"response_format": JSON | {"json": 1}}, ["response_format.json"]),
        ({"tool_choice": {"type": "function"}}, ["tool_choice", "tool_choice.function"]),
        ({"tool_choice": {"type": "function", "function": {}}}, ["tool_choice", "tool_choice.function.name"]),
        ({"tool_choice": "any"}, ["tool_choice"]),
        ({"tool_choice": 5}, ["tool_choice"]),
        ({"stop": ["a", 1]}, ["stop", "stop.1"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            ["messages.0.content", "messages.0.content.0.text"],
        ),
        ({"messages": [{"role": "user", "content": "x", "str": 1}]}, ["messages.0.str"]),
        ({"max-tokens": 5}, ["max-tokens"]),
        ({"body": 5}, ["body"]),
        ({"structured_outputs": {"json": 5}}, ["structured_outputs.json"]),
    ],
)
def test_only_fields_of_the_request_are_named(client, fields, names):
    answer = client.post("/", json={"messages": HELLO} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, names[0])
    found = [re.match(r"unknown field '(.*)'|([^ ]+): ", line) for line in error["message"].split("; ")]
    assert list(dict.fromkeys(each[1] or each[2] for each in found)) == names
    assert "NamedTool" not in error["message"]


@pytest.mark.parametrize(
    ("request_", "limit"),
    [
        (completion(min_tokens=50), "max_tokens is 16 where it is not given"),
        (completion(min_tokens=50, max_tokens=20), "max_tokens is 20;"),
        (chat(min_tokens=50, max_completion_tokens=20), "max_completion_tokens is 20;"),
    ],
)
def test_more_tokens_at_least_than_at_most(request_, limit):
    with pytest.raises(InvalidRequestError, match=f"min_tokens is 50, but {limit}") as caught:
        request_.sampling(0, 100, 16)
    assert caught.value.param == "min_tokens"
