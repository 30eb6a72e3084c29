"""What the API does beyond plain answers, through the official client: keys, limits, echo, stop strings, metrics."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.http_server import until
from tests.integration.openai_api.settings import CAPITAL, GREEDY, KEYS, MODEL

STORY = {"prompt": "Once upon a time", "max_tokens": 900}


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
    with pytest.raises(openai.APIStatusError) as caught:
        tell_story(client, timeout=0.5)
    assert caught.value.status_code == 408
    assert caught.value.code == "request_timeout"
    server.wait_idle()
    with pytest.raises(openai.APIError, match=r"within its 0\.8 s"):
        list(tell_story(client, stream=True, timeout=0.8))
    server.wait_idle()


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
        until(lambda: server.stats()["running"] == 1, 60)
        answer = client.chat.completions.create(messages=CAPITAL, **GREEDY)
        assert "Paris" in answer.choices[0].message.content
    until(lambda: server.stats()["running"] == 0, 60)
    server.wait_idle()


def test_a_megabyte_of_text_delays_nobody(server, client, http):
    """While it is tokenized, a stream goes on and other requests are answered."""
    text = "once upon a time " * 60_000
    chunks, healths = 0, 0
    done = threading.Event()

    def read():
        nonlocal chunks
        with tell_story(client, stream=True) as stream:
            for _ in stream:
                chunks += 1
                if done.is_set():
                    return

    def probe():
        nonlocal healths
        with server.client() as own:
            while not done.wait(0.01):
                healths += own.get("/health").status_code == 200

    with ThreadPoolExecutor(2) as threads:
        try:
            running = [threads.submit(read), threads.submit(probe)]
            until(lambda: chunks > 20, 60)
            before = chunks, healths
            tokenized = http.post("/tokenize", json={"prompt": text})
            meanwhile = chunks - before[0], healths - before[1]
        finally:
            done.set()
        for each in running:
            each.result(60)
    assert tokenized.json()["count"] > 100_000
    refused = http.post("/v1/completions", json={"prompt": text})  # too long whatever its tokens are
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert min(meanwhile) > 2  # of each at most the one under way, if the event loop stood still
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
    assert len(set(counts)) > 2  # none, the first, all
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
