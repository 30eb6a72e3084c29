"""What the API does beyond plain answers, through the official client: keys, limits, echo, tools, reasoning, metrics.

The model is the default one with a chat template that knows tools and reasoning; examples in the conversation make it
write them.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.default_model import ensure_default_model
from cluster.serve.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from cluster.tokenizer import Tokenizer
from tests.integration.http_server import running_server, until

MODEL = "SmolLM2-tools"
KEYS = ["first-key", "second-key"]
TEMPLATE = """\
{%- for message in messages %}
{%- if loop.first and tools %}<|im_start|>system
Functions: {% for tool in tools %}{{ tool | tojson }} {% endfor %}
Call one as <tool_call>{"name": NAME, "arguments": {}}</tool_call>. Thoughts go in <think></think>.<|im_end|>
{% endif %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if thinking is defined %}<think>
{% endif %}{% endif %}"""
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24}
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
STORY = {"prompt": "Once upon a time", "max_tokens": 900}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """The default model under another chat template."""
    path = tmp_path_factory.mktemp("model") / MODEL
    path.mkdir()
    for file in ensure_default_model().iterdir():
        (path / file.name).symlink_to(file)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def server(private_ray, model_path):
    settings = {
        "model": str(model_path),
        "api_key": KEYS,
        "max_body_bytes": 2_000_000,
        "cors_origin": ["https://app.example"],
        "request_timeout": 30,
    }
    with running_server(**settings) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60, headers={"authorization": f"Bearer {KEYS[1]}"}) as http:
        yield http


@pytest.fixture(scope="module")
def tokenizer(model_path):
    return Tokenizer(model_path)


def tell_story(client, stream=False, **fields):
    """A completion that takes long."""
    return client.completions.create(model=MODEL, **STORY, stream=stream, extra_body={"ignore_eos": True} | fields)


# ---------------------------------------------------------------------------------------------- keys and limits


def test_every_key_opens_and_others_do_not(server, client):
    for key in KEYS:
        assert client.with_options(api_key=key).models.list().data[0].id == MODEL
    for key in ("first-ke", "first-keyy", "x", "schlüssel"):
        response = (
            server.get("/v1/models")
            if key == "x"
            else httpx.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}".encode()})
        )
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(messages=CAPITAL, **GREEDY)
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert server.get(path).status_code == 200
    assert server.get("/openapi.json").status_code == 401


def test_large_bodies_are_refused_announced_or_not(http):
    body = json.dumps({"prompt": "a" * 2_100_000}).encode()
    for content in (body, iter([body[:1_000_000], body[1_000_000:]])):
        response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert "2000000 bytes" in response.json()["error"]["message"]


def test_only_the_configured_origin_may_call(http):
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    path = "/v1/chat/completions"
    allowed = http.options(path, headers=ask | {"origin": "https://app.example"})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert http.options(path, headers=ask | {"origin": "https://evil.example"}).status_code == 400
    refused = httpx.get(f"{http.base_url}/v1/models", headers={"origin": "https://app.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"  # so that the page can read why


def test_a_deadline_ends_a_request(server, client):
    start = time.monotonic()
    with pytest.raises(openai.APIStatusError) as caught:
        tell_story(client, timeout=0.5)
    assert caught.value.status_code == 408
    assert caught.value.code == "request_timeout"
    assert 0.4 < time.monotonic() - start < 5
    server.wait_idle(2)
    with pytest.raises(openai.APIError, match=r"within its 0\.8 s"):
        list(tell_story(client, stream=True, timeout=0.8))
    server.wait_idle(2)


def test_who_reads_nothing_holds_up_nobody(server, client):
    """Through Ray Serve's proxy, which takes what the client does not: the request runs to its end."""
    body = json.dumps(STORY | {"ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((host, int(port)))
        deaf.sendall(head.encode() + body)
        until(lambda: server.stats()["running"] == 1, 10)
        answer = client.chat.completions.create(messages=CAPITAL, **GREEDY)
        assert "Paris" in answer.choices[0].message.content
    until(lambda: server.stats()["running"] == 0, 5)
    server.wait_idle()


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


def test_a_megabyte_of_text_delays_nobody(server, client, http):
    text = "once upon a time " * 60_000
    gaps, slow_health = [], []
    done = threading.Event()

    def read():
        last = time.monotonic()
        with tell_story(client, stream=True) as stream:
            for _ in stream:
                now = time.monotonic()
                gaps.append(now - last)
                last = now
                if done.is_set():
                    return

    def probe():
        with server.client() as own:
            while not done.wait(0.01):
                start = time.monotonic()
                own.get("/health")
                slow_health.append(time.monotonic() - start)

    with ThreadPoolExecutor(2) as threads:
        try:
            running = [threads.submit(read), threads.submit(probe)]
            until(lambda: len(gaps) > 20, 20)
            gaps.clear()
            slow_health.clear()
            start = time.monotonic()
            refused = http.post("/v1/completions", json={"prompt": text})
            took = time.monotonic() - start
        finally:
            done.set()
        for each in running:
            each.result(20)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert max(gaps) < max(0.5, took / 2)
    assert max(slow_health) < max(0.5, took / 2)
    server.wait_idle()


# ---------------------------------------------------------------------------------------------- other endpoints


def test_tokenize_and_detokenize(http, client, tokenizer):
    text = "Grüße, 世界! 👩‍👩‍👧"
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 1024
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": CAPITAL}).json()
    assert chat["count"] == client.chat.completions.create(messages=CAPITAL, **GREEDY).usage.prompt_tokens
    rendered = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert rendered == tokenizer.render_chat(CAPITAL)
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    for path, body, param in [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CAPITAL}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
    ]:
        response = http.post(path, json=body)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["param"] == param


def metrics(server):
    """Values by name, and by (name, le or finished_reason) where there is one."""
    values = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
            detail = sample.labels.get("le") or sample.labels.get("finished_reason")
            values[(sample.name, detail) if detail else sample.name] = sample.value
    return values


def test_metrics_count_what_happened(server, client):
    server.wait_idle()
    before = metrics(server)
    prompt = "A prompt that nobody has sent before, long enough for a page or two of the cache of prefixes: 31415926"
    for _ in range(2):
        first = client.completions.create(prompt=prompt, extra_body={"ignore_eos": True}, **GREEDY | {"max_tokens": 5})
    stopped = client.chat.completions.create(messages=CAPITAL, **GREEDY)
    server.wait_idle()
    after = metrics(server)

    def grew(*name):
        name = name[0] if len(name) == 1 else name
        return after.get(name, 0) - before.get(name, 0)

    prompts = 2 * first.usage.prompt_tokens + stopped.usage.prompt_tokens
    assert grew("raydix_prompt_tokens_total") == prompts == grew("raydix_prefix_cache_queries_total")
    assert grew("raydix_generation_tokens_total") == 10 + stopped.usage.completion_tokens
    cached = first.usage.prompt_tokens_details.cached_tokens + stopped.usage.prompt_tokens_details.cached_tokens
    assert grew("raydix_prefix_cache_hits_total") == cached >= 16
    assert grew("raydix_request_success_total", "length") == 2
    assert grew("raydix_request_success_total", "stop") == 1
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert grew(f"raydix_{name}_seconds_count") == grew(f"raydix_{name}_seconds_bucket", "+Inf") == 3
        assert grew(f"raydix_{name}_seconds_sum") > 0
    assert grew("raydix_inter_token_latency_seconds_count") == grew("raydix_generation_tokens_total") - 3
    assert grew("raydix_step_time_seconds_count") == grew("raydix_steps_total") > 0
    assert after["raydix_engine_up"] == 1
    assert after["raydix_num_requests_running"] == after["raydix_num_requests_waiting"] == 0
    assert after["raydix_kv_cache_usage_perc"] == 0
    assert after["raydix_recoveries_total"] == 0


def test_user_is_passed_on_and_priority_needs_its_policy(client):
    assert client.chat.completions.create(messages=CAPITAL, user="alice", **GREEDY).choices
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=CAPITAL, extra_body={"priority": 3}, **GREEDY)
    assert caught.value.param == "priority"


# ---------------------------------------------------------------------------------------------- text


def test_echo_puts_the_prompt_first(client, tokenizer):
    prompt = "Once upon a time"
    plain = client.completions.create(prompt=prompt, **GREEDY).choices[0].text
    for given in (prompt, tokenizer.encode(prompt)):
        echoed = client.completions.create(prompt=given, echo=True, **GREEDY)
        assert echoed.choices[0].text == prompt + plain
        assert echoed.usage.completion_tokens == 24
    only = client.completions.create(prompt=[prompt, "Hello"], echo=True, n=2, **GREEDY | {"max_tokens": 0})
    assert [choice.text for choice in only.choices] == [prompt, prompt, "Hello", "Hello"]
    stream = client.completions.create(prompt=prompt, echo=True, stream=True, **GREEDY)
    texts = [chunk.choices[0].text for chunk in stream]
    assert texts[0] == prompt
    assert "".join(texts) == prompt + plain


def test_the_stop_string_can_stay(client, tokenizer):
    text = client.completions.create(prompt="Once upon a time", **GREEDY).choices[0].text
    words = text.split(" ")
    stop = " " + words[4] + " " + words[5][:1]
    keep = {"include_stop_str_in_output": True}
    kept = client.completions.create(prompt="Once upon a time", stop=stop, extra_body=keep, **GREEDY)
    assert kept.choices[0].text == text[: text.index(stop) + len(stop)]
    assert kept.choices[0].finish_reason == "stop"
    stream = client.completions.create(prompt="Once upon a time", stop=stop, extra_body=keep, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == kept.choices[0].text
    ids = tokenizer.encode(text)[:4]
    token = {"stop_token_ids": [ids[-1]]}
    kept = client.completions.create(prompt="Once upon a time", extra_body=keep | token, **GREEDY)
    assert kept.choices[0].text == tokenizer.decode(ids)


def test_stop_strings_at_both_ends_of_the_text(client):
    def say(**fields):
        [choice] = client.completions.create(prompt="Once upon a time", **GREEDY | fields).choices
        return choice.text, choice.finish_reason

    text, reason = say()
    assert reason == "length"
    assert say(stop=text[:3]) == ("", "stop")
    last = text[-5:]
    assert say(stop=last) == (text[: text.index(last)], "stop")
    assert say(stop=text + "and more") == (text, "length")


def test_characters_of_several_tokens_arrive_whole(client):
    prompt = "👩‍👩‍👧 世界 é 👩‍👩‍👧 世界 é 👩‍👩‍👧 世界 é 👩‍👩‍👧"
    settings = GREEDY | {"prompt": prompt, "max_tokens": 40}
    whole = client.completions.create(**settings).choices[0].text
    assert "世界" in whole and "👩" in whole
    parts = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **settings)]
    assert "".join(parts) == whole
    assert not any("\ufffd" in part for part in parts[:-1])  # the last may be cut off by max_tokens


def test_usage_in_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.chat.completions.create(messages=CAPITAL, stream=True, stream_options=options, **GREEDY)
    chunks = list(stream)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 0 and counts[1] >= 1 and counts[-1] == counts[-2]
    assert len(set(counts)) > 3
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1


def test_a_final_message_is_continued(client):
    messages = [*CAPITAL, {"role": "assistant", "content": "The capital of France, as everybody knows, is"}]
    go_on = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(messages=messages, extra_body=go_on, **GREEDY)
    assert answer.choices[0].message.content.startswith(" Paris")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=CAPITAL, extra_body=go_on, **GREEDY)
    assert caught.value.param == "continue_final_message"


def test_content_parts_and_all_roles(client, tokenizer):
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": "of France?"}]
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"what": "France"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Paris"},
    ]
    answer = client.chat.completions.create(messages=messages, **GREEDY)
    rendered = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital\nof France?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "look_up", "arguments": {"what": "France"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>tool\nParis<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer.usage.prompt_tokens == len(tokenizer.encode(rendered))
    assert "Paris" in answer.choices[0].message.content


# ---------------------------------------------------------------------------------------------- tools and reasoning

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


def called(*cities):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": "get_weather", "arguments": json.dumps({"city": city})},
            }
            for number, city in enumerate(cities)
        ],
    }


def ask(city):
    return {"role": "user", "content": f"What is the weather in {city}?"}


EXAMPLES = [ask("Rome"), called("Rome"), ask("London"), called("London")]
PARIS = [*EXAMPLES, ask("Paris")]
TWO = [
    ask("Rome and London"), called("Rome", "London"), ask("Berlin and Oslo"), called("Berlin", "Oslo"),
    ask("Paris and Tokyo"),
]  # fmt: skip
TOOLED = GREEDY | {"tools": [WEATHER, TIME], "max_tokens": 80}


def streamed_calls(stream):
    """(content, [(name, arguments)], finish reason) of a stream; checks the form of its deltas."""
    content, calls, finish = "", [], None
    for chunk in stream:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for part in choice.delta.tool_calls or []:
            if part.id is not None:
                assert part.index == len(calls)
                assert part.type == "function"
                calls.append([part.function.name, ""])
            else:
                assert part.function.name is None
            calls[part.index][1] += part.function.arguments
    return content, [tuple(call) for call in calls], finish


@pytest.mark.parametrize(("messages", "cities"), [(PARIS, ["Paris"]), (TWO, ["Paris", "Tokyo"])])
def test_the_model_calls_tools(client, messages, cities):
    [choice] = client.chat.completions.create(messages=messages, **TOOLED).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("get_weather", {"city": city}) for city in cities]
    assert len({call.id for call in choice.message.tool_calls}) == len(cities)

    content, parts, finish = streamed_calls(client.chat.completions.create(messages=messages, stream=True, **TOOLED))
    assert (content, finish) == ("", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in parts] == calls


def test_a_named_function_is_called_whatever_is_asked(client):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    for messages in (CAPITAL, PARIS):
        answer = client.chat.completions.create(messages=messages, tool_choice=choice, **TOOLED | {"max_tokens": 20})
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        assert call.function.arguments.startswith("{")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    stream = client.chat.completions.create(messages=PARIS, tool_choice=choice, stream=True, **TOOLED)
    assert streamed_calls(stream)[:2] == ("", [("get_weather", '{"city": "Paris"}')])


def test_parallel_calls_can_be_switched_off(client):
    answer = client.chat.completions.create(messages=TWO, parallel_tool_calls=False, **TOOLED)
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_required_means_a_call(client):
    answer = client.chat.completions.create(messages=PARIS, tool_choice="required", **TOOLED)
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    only_time = TOOLED | {"tools": [TIME], "max_tokens": 4}
    answer = client.chat.completions.create(messages=CAPITAL, tool_choice="required", **only_time)
    assert answer.choices[0].message.tool_calls[0].function.name == "get_time"


def test_without_tools_the_same_text_is_content(client, server):
    none = client.chat.completions.create(messages=PARIS, tool_choice="none", **TOOLED | {"max_tokens": 8})
    assert none.choices[0].message.content.startswith("<tool_call>")
    assert none.choices[0].message.tool_calls is None
    bare = client.chat.completions.create(messages=PARIS, **GREEDY | {"max_tokens": 1})
    assert bare.usage.prompt_tokens == none.usage.prompt_tokens  # the tools were not in the prompt
    with_tools = client.chat.completions.create(messages=PARIS, **TOOLED | {"max_tokens": 1})
    assert with_tools.usage.prompt_tokens > bare.usage.prompt_tokens
    server.wait_idle()


def test_reasoning_is_apart_from_the_answer(client):
    def thought(country, city):
        text = f"<think>\nThe user asks for {country}.\n</think>\n\nIt is {city}."
        return [{"role": "user", "content": f"Capital of {country}?"}, {"role": "assistant", "content": text}]

    messages = [*thought("Italy", "Rome"), *thought("Spain", "Madrid"), *thought("Austria", "Vienna")]
    messages.append({"role": "user", "content": "Capital of France?"})
    settings = GREEDY | {"max_tokens": 60}
    message = client.chat.completions.create(messages=messages, **settings).choices[0].message
    assert message.reasoning_content == "The user asks for France."
    assert message.content == "It is Paris."
    deltas = [
        chunk.choices[0].delta for chunk in client.chat.completions.create(messages=messages, stream=True, **settings)
    ]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content
    opened = {"chat_template_kwargs": {"thinking": True}}  # the template writes <think>
    message = client.chat.completions.create(messages=messages, extra_body=opened, **settings).choices[0].message
    assert (message.reasoning_content, message.content) == ("The user asks for France.", "It is Paris.")


# ---------------------------------------------------------------------------------------------- log probabilities


@pytest.fixture(scope="module")
def reference(model_path):
    """Function from token ids to transformers' log probabilities float32[n, vocabulary] of what follows each."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()

    def log_probabilities(ids):
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1).numpy()

    return log_probabilities


def test_log_probabilities_of_a_completion_are_those_of_transformers(client, tokenizer, reference):
    prompt = "Once upon a time"
    settings = GREEDY | {"prompt": prompt, "logprobs": 3, "max_tokens": 8}
    choice = client.completions.create(**settings).choices[0]
    scores = choice.logprobs
    assert "".join(scores.tokens) == choice.text
    assert scores.text_offset == [sum(map(len, scores.tokens[:i])) for i in range(8)]
    prompt_ids = tokenizer.encode(prompt)
    ids = [tokenizer.encode(token)[0] for token in scores.tokens]
    expected = reference(prompt_ids + ids)
    for place, (token, own, top) in enumerate(
        zip(ids, scores.token_logprobs, scores.top_logprobs, strict=True), len(prompt_ids) - 1
    ):
        assert own == pytest.approx(expected[place, token], abs=1e-3)
        assert len(top) == 3
        assert sorted(top.values(), reverse=True) == pytest.approx(sorted(expected[place])[:-4:-1], abs=1e-3)
        assert top[tokenizer.decode([token])] == own == max(top.values())

    echoed = client.completions.create(echo=True, **settings).choices[0]
    assert echoed.text == prompt + choice.text
    assert "".join(echoed.logprobs.tokens) == echoed.text
    assert echoed.logprobs.token_logprobs[0] is None
    own = [expected[place, token] for place, token in enumerate(prompt_ids[1:])] + scores.token_logprobs
    assert echoed.logprobs.token_logprobs[1:] == pytest.approx(own, abs=1e-3)
    assert echoed.logprobs.text_offset[len(prompt_ids)] == len(prompt)
    chunks = list(client.completions.create(echo=True, stream=True, **settings))
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for part in parts for token in part.tokens] == echoed.logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset] == echoed.logprobs.text_offset
    only = client.completions.create(echo=True, **settings | {"max_tokens": 0, "prompt": [prompt, "Hi"]}).choices
    assert only[0].logprobs.token_logprobs[1:] == pytest.approx(own[: len(prompt_ids) - 1], abs=1e-3)
    assert only[1].text == "Hi"


def test_log_probabilities_of_a_chat(client):
    settings = GREEDY | {"messages": CAPITAL, "logprobs": True, "top_logprobs": 2, "max_tokens": 6}
    choice = client.chat.completions.create(**settings).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
    for entry in entries:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob > entry.top_logprobs[1].logprob
    streamed = []
    for chunk in client.chat.completions.create(stream=True, **settings):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    plain = client.chat.completions.create(**settings | {"top_logprobs": 0}).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in plain] == [[]] * 6


def test_log_probabilities_of_a_prompt(http, tokenizer, reference):
    body = {"prompt": "Once upon a time", "max_tokens": 1, "prompt_logprobs": 2}
    answer = http.post("/v1/completions", json=body).json()
    ids = tokenizer.encode(body["prompt"])
    expected = reference(ids)
    first, *rest = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    for place, (token, entry) in enumerate(zip(ids[1:], rest, strict=True)):
        assert entry[str(token)]["logprob"] == pytest.approx(expected[place, token], abs=1e-3)
        assert entry[str(token)]["rank"] == int((expected[place] > expected[place, token]).sum()) + 1
        assert entry[str(int(expected[place].argmax()))]["rank"] == 1
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    chat = http.post("/v1/chat/completions", json={"messages": CAPITAL, "max_tokens": 1, "prompt_logprobs": 0}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])


# ---------------------------------------------------------------------------------------------- bias and penalties


def test_bias_and_penalties_change_what_is_said(client, tokenizer, reference):
    def say(repetition_penalty=None, **fields):
        extra = {"repetition_penalty": repetition_penalty, "ignore_eos": True}
        settings = {"prompt": "1, 1, 1, 1, 1, 1, 1, 1, 1,", "extra_body": extra} | GREEDY | fields
        return client.completions.create(**settings).choices[0].text

    [cat], [dog], [one] = (tokenizer.encode(text) for text in (" cat", " dog", "1"))
    assert say(logit_bias={cat: 100}, max_tokens=4) == " cat cat cat cat"
    assert say(logit_bias={cat: 100, dog: 80}, repetition_penalty=2.0, max_tokens=2) == " cat dog"
    assert say(max_tokens=9) == " 1, 1, 1,"
    assert "1" not in say(logit_bias={one: -100}, max_tokens=9)
    assert say(frequency_penalty=2.0, max_tokens=9) != " 1, 1, 1,"
    # After " cat" the other word is made one less likely, in logits, than that one: a penalty of two turns them round.
    after_cat = reference(tokenizer.encode("1, 1, 1, 1, 1, 1, 1, 1, 1, cat"))[-1]
    bias = {cat: 80, dog: 79 + float(after_cat[cat] - after_cat[dog])}
    assert say(logit_bias=bias, max_tokens=2) == " cat cat"
    assert say(logit_bias=bias, max_tokens=2, presence_penalty=2.0) == " cat dog"
