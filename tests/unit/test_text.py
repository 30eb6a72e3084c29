"""Prompts to tokens in the ingress: one BOS, checked ids, and an event loop that stays free."""

from __future__ import annotations

import asyncio
import time

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from cluster.errors import InvalidRequestError
from cluster.serve.text import TextWorker
from cluster.tokenizer import Tokenizer
from tests.unit import tiny_tokenizers

TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{{ extra }}"


@pytest.fixture
def worker(tmp_path):
    """A text worker whose tokenizer and chat template both write a BOS."""
    path = tiny_tokenizers.byte_level(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    tokenizer = Tokenizer(tiny_tokenizers.save(backend, path, chat_template=TEMPLATE))
    worker = TextWorker(tokenizer, vocab_size=500)
    yield worker
    worker.close()


async def test_a_prompt_and_a_chat_begin_with_one_bos(worker):
    bos = worker.tokenizer.backend.token_to_id("<s>")
    prompt = await worker.encode("hello")
    chat = await worker.encode_chat([{"role": "user", "content": "hello"}], {})
    for ids in (prompt, chat):
        assert ids[0] == bos
        assert ids.count(bos) == 1


async def test_template_options_reach_the_template(worker):
    messages = [{"role": "user", "content": "hello"}]
    plain, extra = await worker.encode_chat(messages, {}), await worker.encode_chat(messages, {"extra": " there"})
    assert extra[: len(plain)] == plain
    assert worker.tokenizer.decode(extra[len(plain) :]) == " there"


@pytest.mark.parametrize("prompt", ["", [], [3, 500], [-1]])
async def test_prompts_that_cannot_be_served(worker, prompt):
    with pytest.raises(InvalidRequestError) as caught:
        await worker.encode(prompt)
    assert caught.value.param == "prompt"


async def test_token_ids_pass_through(worker):
    assert await worker.encode([499, 0, 7]) == [499, 0, 7]


async def test_a_slow_prompt_stops_neither_the_loop_nor_the_next_prompt():
    class Slow:
        def encode(self, text):
            time.sleep(0.5 if text == "long" else 0)
            return [1]

    worker = TextWorker(Slow(), vocab_size=10)
    try:
        slow = asyncio.create_task(worker.encode("long"))
        await asyncio.sleep(0)
        start = time.monotonic()
        assert await worker.encode("short") == [1]
        assert time.monotonic() - start < 0.3
        assert not slow.done()
        assert await slow == [1]
    finally:
        worker.close()
