"""Anything that a client may send: an answer in OpenAI's form, no trace in it, and no harm done."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS
from schemathesis.generation import GenerationMode

from cluster.serve.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.integration.openai_api.settings import CAPITAL, GREEDY, KEYS

KEY = {"authorization": f"Bearer {KEYS[0]}"}
CHECKED = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")


def check_harmless(status, text):
    """No error of the server's but that it has no room, none without a reason, no trace of its code."""
    assert status < 500 or status == 503, (status, text)
    assert "Traceback" not in text and ".py" not in text, text
    if status >= 400 and text:  # a HEAD request has no body
        assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}


def made_likely(body, mode):
    """The body as it is, or for one that is to be right: with our model, often a plain prompt, and one other field at
    most, since each may have limits that the document does not know."""
    if mode is GenerationMode.POSITIVE:
        rng = random.Random(repr(body))
        needed = body.keys() & {"prompt", "messages", "tokens"}
        others = sorted(body.keys() - needed - {"model"})
        body = {name: body[name] for name in [*needed, *rng.sample(others, min(1, len(others)))]}
        if "messages" in body and rng.random() < 0.7:
            body["messages"] = CAPITAL
    return body


def send_many(operation, mode, examples, checks):
    """Requests of one operation, right ones or wrong ones; how often each status came back."""
    statuses = Counter()

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(operation.as_strategy(generation_mode=mode))
    def send(case):
        if isinstance(case.body, dict) and operation.method == "post":
            case.body = made_likely(case.body, mode)
            if "/completions" in case.path:
                case.body = {"timeout": 5.0} | case.body | {"max_tokens": 1}
        response = case.call(headers=KEY, timeout=60)
        statuses[response.status_code] += 1
        check_harmless(response.status_code, response.text)
        case.validate_response(response, checks=checks)

    send()
    return statuses


def follow_the_document(server, examples):
    """Requests after our OpenAPI document; answers must be as it says."""
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=KEY)
    document = document.exclude(path="/flight_record")  # has nothing to vary, and each call leaves a file
    checks = CHECKS.get_by_names(CHECKED)
    statuses = Counter()
    for result in document.get_all_operations():
        operation = result.ok()
        modes = GenerationMode if operation.body else [GenerationMode.POSITIVE]
        for mode in modes:
            statuses += send_many(operation, mode, examples, checks)
    return statuses


def test_requests_after_the_document(server, client):
    statuses = follow_the_document(server, examples=4)
    assert statuses[200] > 10 and statuses[400] > 10, statuses
    assert "Paris" in client.chat.completions.create(messages=CAPITAL, **GREEDY).choices[0].message.content
    server.wait_idle()


@pytest.mark.full_grid
@pytest.mark.timeout(0)
def test_many_requests_after_the_document(server, client):
    print(follow_the_document(server, examples=150))
    assert "Paris" in client.chat.completions.create(messages=CAPITAL, **GREEDY).choices[0].message.content
    server.wait_idle()


DEEP = "[" * 100_000
BODIES = [
    ("", "JSON object"), ("null", "JSON object"), ("[]", "JSON object"), ("{", "not valid JSON"),
    (DEEP, "nested too deeply"), ('{"prompt": ' + DEEP + "]" * 100_000 + "}", "nested too deeply"),
    (b'{"prompt": "\xff"}', "not valid UTF-8"), ('{"prompt": "\\ud83d"}', "lone surrogate"),
    ('{"prompt": NaN}', "prompt"), ('{"prompt": "a", "temperature": 1e999}', "temperature"),
    ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", ""),
]  # fmt: skip


@pytest.mark.parametrize(("body", "reason"), BODIES, ids=range(len(BODIES)))
def test_malformed_bodies_say_what_is_wrong(http, body, reason):
    response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    check_harmless(400, response.text)
    assert reason in response.json()["error"]["message"]


def test_a_probe_may_ask_for_the_head_alone(http):
    for path in ("/health", "/ready"):
        response = http.head(path)
        assert (response.status_code, response.content) == (200, b"")
    assert http.head("/v1/models").status_code == 405


VALUES = [
    None, True, False, 0, 1, 2, -1, 0.5, 1e308, 2**63, "", "a", "\u0000", "\ud83d", "\U0001f600", [], [""], ["a"], [1],
    [[1]], [[]], [None], {}, {"a": 1}, {"type": "text"}, {"type": "function"}, {"5": 1}, {"include_usage": True},
    {"type": "function", "function": {"name": "get_weather"}}, [{"role": "user", "content": "a"}], [{"role": "tool"}],
    [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "["}}]}],
]  # fmt: skip


def test_two_hundred_wild_bodies_harm_nothing(server, http):
    rng = random.Random(11)
    common = list(CompletionRequest.model_fields.keys() | CompletionRequest.neutral_only.keys())
    chat = list(ChatCompletionRequest.model_fields.keys() | ChatCompletionRequest.neutral_only.keys())
    kinds = [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}, common),
        ("/v1/chat/completions", {"messages": CAPITAL, "max_tokens": 1}, chat),
        ("/tokenize", {"prompt": "a"}, list(TokenizeRequest.model_fields)),
        ("/detokenize", {"tokens": [1]}, list(DetokenizeRequest.model_fields)),
    ]
    statuses = Counter()
    for _ in range(200):
        path, body, names = rng.choice(kinds)
        body = body | {rng.choice(names): rng.choice(VALUES) for _ in range(rng.randint(0, 2))}
        content = json.dumps(rng.choice([body] * 9 + [[body]]))
        if rng.random() < 0.1:
            content = content[: rng.randrange(len(content))]
        response = http.post(path, content=content, headers={"content-type": "application/json"})
        statuses[response.status_code] += 1
        assert response.status_code in (200, 400, 404, 408, 422), (content, response.text)
        check_harmless(response.status_code, response.text)
    assert statuses[200] > 10 and statuses[400] > 100
    assert "Paris" in http.post("/v1/chat/completions", json=GREEDY | {"messages": CAPITAL}).text
    server.wait_idle()
