"""The HTTP API on a real model, through real clients."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from cluster.default_model import ensure_default_model
from cluster.flight import read_recording
from cluster.flight.replay import find_wrong_slot
from cluster.tokenizer import Tokenizer
from tests.integration.http_server import MODEL, events, running_server

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 24}
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def server(private_ray):
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(ensure_default_model())


def chat(server, **fields):
    response = server.post("/v1/chat/completions", {"messages": CAPITAL} | GREEDY | fields)
    assert response.status_code == 200, response.text
    return response.json()


def complete(server, **fields):
    response = server.post("/v1/completions", {"prompt": "Once upon a time"} | GREEDY | fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_what_is_served(server):
    models = server.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == [MODEL]
    assert models["data"][0]["max_model_len"] == 1024
    assert server.get(f"/v1/models/{MODEL}").json() == models["data"][0]
    assert server.get("/v1/models/other").status_code == 404
    assert server.get("/version").json().keys() == {"version"}
    assert server.get("/health").json()["status"] == "ok"
    assert server.get("/ready").json()["status"] == "ready"
    assert "/v1/chat/completions" in server.get("/openapi.json").json()["paths"]


def test_the_last_steps_are_saved_on_request_without_their_tokens(server):
    complete(server)
    (saved,) = server.post("/flight_record").json()["recordings"]
    recording = read_recording(Path(saved["file"]))
    Path(saved["file"]).unlink()
    assert recording.steps and recording.broken is None and find_wrong_slot(recording) is None
    assert not any(step.plan.run_tokens.any() for step in recording.steps)
    assert "raydix_integrity_violations_total" in server.get("/metrics").text


def test_chat_answers_and_counts(client, tokenizer):
    answer = client.chat.completions.create(model=MODEL, messages=CAPITAL, **GREEDY)
    [choice] = answer.choices
    assert "Paris" in choice.message.content
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert not choice.message.content.endswith("<|im_end|>")
    ids = tokenizer.encode(choice.message.content)
    assert answer.usage.completion_tokens == len(ids) + 1  # and the end of the turn
    assert answer.usage.prompt_tokens == len(tokenizer.apply_chat_template(CAPITAL))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_is_the_same_text(server, client):
    whole = chat(server)
    stream = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    *rest, last = chunks
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in rest)
    assert text == whole["choices"][0]["message"]["content"]
    assert len([chunk for chunk in rest if chunk.choices[0].delta.content]) > 1
    assert [c.choices[0].finish_reason for c in rest if c.choices[0].finish_reason] == ["stop"]
    assert last.choices == []
    assert last.usage.completion_tokens == whole["usage"]["completion_tokens"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_streamed_completion_is_the_same_text(server):
    whole = complete(server)
    body = {"prompt": "Once upon a time", "stream": True} | GREEDY
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *payloads, done = events(response)
    assert done == "[DONE]"
    chunks = [json.loads(payload) for payload in payloads]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in chunks)
    assert whole["usage"]["completion_tokens"] == GREEDY["max_tokens"]


def test_the_second_turn_finds_the_first_in_the_cache(server):
    question = [{"role": "user", "content": "Name three rivers in Europe, and say in which countries they are."}]
    first = chat(server, messages=question)
    turn = [
        *question,
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "Which is the longest?"},
    ]
    second = chat(server, messages=turn)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] // 16 * 16 > 0
    assert cached < second["usage"]["prompt_tokens"]


def test_prompts_in_all_forms(server, tokenizer):
    texts = ["Once upon a time", "The sky is"]
    ids = [tokenizer.encode(text) for text in texts]
    single = [complete(server, prompt=text)["choices"][0]["text"] for text in texts]
    for prompt in (texts, ids):
        answer = complete(server, prompt=prompt)
        assert [choice["text"] for choice in answer["choices"]] == single
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert complete(server, prompt=ids[0])["choices"][0]["text"] == single[0]


def test_lengths_are_exact(server):
    for limit in (0, 1, 2, 17):
        answer = complete(server, max_tokens=limit)
        assert answer["usage"]["completion_tokens"] == limit
        assert answer["choices"][0]["finish_reason"] == "length"
    assert complete(server, max_tokens=None)["usage"]["completion_tokens"] == 16
    limited = chat(server, max_tokens=None, max_completion_tokens=3)
    assert limited["usage"]["completion_tokens"] == 3
    assert limited["choices"][0]["finish_reason"] == "length"


def test_ignore_eos_and_min_tokens(server):
    assert chat(server)["usage"]["completion_tokens"] < 24
    assert chat(server, ignore_eos=True)["usage"]["completion_tokens"] == 24
    assert chat(server, min_tokens=20)["usage"]["completion_tokens"] >= 20


def test_stop_strings_and_stop_tokens(server, tokenizer):
    text = complete(server)["choices"][0]["text"]
    words = text.split(" ")
    stop = " " + words[4] + " " + words[5][:1]  # spans tokens
    before = text[: text.index(stop)]
    answer = complete(server, stop=["never", stop])
    assert answer["choices"][0] == {"index": 0, "text": before, "logprobs": None, "finish_reason": "stop"}
    assert answer["usage"]["completion_tokens"] < 24
    token = tokenizer.encode(text)[3]
    answer = complete(server, stop_token_ids=[token])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == tokenizer.decode(tokenizer.encode(text)[:3])
    assert answer["usage"]["completion_tokens"] == 4
    server.wait_idle()


def test_choice_i_has_seed_plus_i(server):
    sampled = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 12, "ignore_eos": True}
    together = complete(server, seed=41, n=3, **sampled)
    assert together["usage"]["completion_tokens"] == 36
    texts = [choice["text"] for choice in together["choices"]]
    assert texts == [complete(server, seed=41 + i, **sampled)["choices"][0]["text"] for i in range(3)]
    assert len(set(texts)) == 3
    assert complete(server, **sampled)["choices"] != complete(server, **sampled)["choices"]  # a fresh seed each time


def test_many_clients_get_their_own_answers(server):
    prompts = [f"The number {number} is" for number in range(8)]

    def text(prompt):
        return complete(server, prompt=prompt, max_tokens=12)["choices"][0]["text"]

    alone = [text(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(text, prompts)) == alone


BAD_REQUESTS = [
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": [0, 10**6]}, 400, "prompt"),
    ("/v1/completions", {"prompt": "word " * 2000}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2000}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
    ("/v1/completions", {"prompt": "a", "top_p": 0}, 400, "top_p"),
    ("/v1/completions", {"prompt": "a", "model": "gpt-5"}, 404, "model"),
    ("/v1/completions", {"prompt": "a", "max_tokens": "ten"}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": 5}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a", "streem": True}, 400, "streem"),
    ("/v1/completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"49152": 1}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ("/v1/completions", {"prompt": "half a pair: \ud83d"}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a", "half \ud83d": 1}, 400, None),
    ("/v1/completions", {}, 400, "prompt"),
    ("/v1/completions", [1], 400, None),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 2000}]}, 400, "messages"),
    ("/v1/chat/completions", {"messages": CAPITAL, "n": 0}, 400, "n"),
    ("/v1/chat/completions", {"messages": CAPITAL, "max_completion_tokens": -3}, 400, "max_completion_tokens"),
    ("/v1/chat/completions", {"messages": CAPITAL, "tools": [{}]}, 400, "tools"),
    ("/v1/chat/completions", {"messages": CAPITAL, "tools": [TOOL]}, 400, "tools"),  # the template has no format
    ("/v1/chat/completions", {"messages": CAPITAL, "response_format": {"type": "xml"}}, 400, "response_format"),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "("}}, 400, "structured_outputs"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_refused_by_name(server, stream):
    for path, body, status, param in BAD_REQUESTS:
        if isinstance(body, dict):
            body = body | {"stream": stream}
        # dumped here: ASCII escapes carry what a client's UTF-8 cannot
        headers = {"content-type": "application/json"}
        response = server.post(path, content=json.dumps(body), headers=headers)
        error = response.json()["error"]
        assert response.status_code == status, (body, response.text)
        assert error["param"] == param or error["param"].startswith(f"{param}."), (body, error)
        assert error["message"]
    server.wait_idle()
    assert chat(server)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"content": b'{"prompt": "a",', "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"\xff\xfe", "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"", "headers": {"content-type": "application/json"}}, 400),
        ({"content": b'{"prompt": "a"}', "headers": {"content-type": "text/plain"}}, 400),
        ({"data": {"prompt": "a"}}, 400),
    ],
)
def test_malformed_bodies(server, options, status):
    response = server.post("/v1/completions", **options)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_unknown_routes_and_methods(server):
    assert server.get("/v2/nothing").json()["error"]["type"] == "not_found_error"
    assert server.get("/v1/completions").status_code == 405
    assert server.get("/v1/completions").json()["error"]["message"]
