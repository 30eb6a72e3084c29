"""Anything that a client may send: an answer in OpenAI's form, no trace in it, and no harm done."""

from __future__ import annotations

import json
import random
from collections import Counter

from cluster.serve.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.integration.openai_api.settings import CAPITAL, GREEDY

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
        if response.status_code != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert "Traceback" not in response.text
    assert statuses[200] > 10 and statuses[400] > 100
    assert "Paris" in http.post("/v1/chat/completions", json=GREEDY | {"messages": CAPITAL}).text
    server.wait_idle()
