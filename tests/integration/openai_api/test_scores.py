"""Log probabilities, bias and penalties through the official client, held against transformers."""

from __future__ import annotations

import pytest

from tests.integration.openai_api.settings import CAPITAL, GREEDY


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


def test_offsets_are_those_of_the_text_that_comes(client):
    settings = GREEDY | {"prompt": "The capital of France is", "logprobs": 0}
    text = client.completions.create(**settings).choices[0].text
    for stop in (text[8:11], text[-6:], "zzz", f"{text[3:9]}zzz"):
        whole = client.completions.create(stop=stop, **settings).choices[0]
        chunks = [chunk.choices[0] for chunk in client.completions.create(stop=stop, stream=True, **settings)]
        assert "".join(chunk.text for chunk in chunks) == whole.text
        streamed = [offset for chunk in chunks for offset in chunk.logprobs.text_offset]
        assert streamed == whole.logprobs.text_offset
        starts = [sum(map(len, whole.logprobs.tokens[:i])) for i in range(len(streamed))]
        assert streamed == [min(start, len(whole.text)) for start in starts]


def test_special_tokens_and_halves_of_characters_in_the_log_probabilities(client, tokenizer):
    special, hi, half = tokenizer.encode("<|im_start|>")[0], tokenizer.encode("Hi"), tokenizer.encode("😀")[0]
    settings = GREEDY | {"prompt": [special, *hi, special], "echo": True, "logprobs": 3, "max_tokens": 2}
    choice = client.completions.create(logit_bias={half: 100}, **settings).choices[0]
    name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes[half])
    assert choice.text.startswith("Hi\ufffd")
    assert choice.logprobs.tokens == ["<|im_start|>", "Hi", "<|im_start|>", name, name]
    assert choice.logprobs.text_offset == [0, 0, 2, 2, 2]
    for own, top in zip(choice.logprobs.token_logprobs[3:], choice.logprobs.top_logprobs[3:], strict=True):
        assert top[name] == own and len(top) in (3, 4)


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
