"""Prompts to tokens in the ingress: one BOS, checked ids, and an event loop that stays free."""

from __future__ import annotations

import asyncio
import random
import threading
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from cluster.errors import InvalidRequestError
from cluster.serve.errors import ContextLengthError
from cluster.serve.messages import ChatMessage
from cluster.serve.text import LONG, ChatRendering, TextWorker
from cluster.tokenizer import Tokenizer
from tests.unit import tiny_tokenizers

TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{{ extra }}"
HELLO = [ChatMessage(role="user", content="hello")]


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
    chat, _ = await worker.encode_chat(HELLO, ChatRendering())
    for ids in (prompt, chat):
        assert ids[0] == bos
        assert ids.count(bos) == 1


async def test_template_options_reach_the_template(worker):
    plain, _ = await worker.encode_chat(HELLO, ChatRendering())
    extra, _ = await worker.encode_chat(HELLO, ChatRendering(variables={"extra": " there"}))
    assert extra[: len(plain)] == plain
    assert worker.tokenizer.decode(extra[len(plain) :]) == " there"


@pytest.mark.parametrize("prompt", ["", [], [3, 500], [-1]])
async def test_prompts_that_cannot_be_served(worker, prompt):
    with pytest.raises(InvalidRequestError) as caught:
        await worker.encode(prompt)
    assert caught.value.param == "prompt"


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(worker):
    small = TextWorker(worker.tokenizer, vocab_size=500, max_seq_len=8)
    longest = max(map(len, worker.tokenizer.backend.get_vocab()))
    assert len(await small.encode("x" * 8 * longest)) > 8  # by this measure it might fit: its tokens are counted later
    with pytest.raises(ContextLengthError) as caught:
        await small.encode("x" * (8 * longest + 1))
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLengthError) as caught:
        await small.encode_chat([ChatMessage(role="user", content="x" * 8 * longest), *HELLO], ChatRendering())
    assert caught.value.param == "messages"
    assert await small.encode_text("x" * 8 * (longest + 1))  # of /tokenize
    with pytest.raises(ContextLengthError, match="9 tokens"):
        await small.encode([1] * 9)
    small.close()


async def test_a_chat_that_the_template_makes_too_long_is_refused_before_it_is_tokenized(worker):
    small = TextWorker(worker.tokenizer, vocab_size=500, max_seq_len=8)
    encoded = []
    worker.tokenizer.encode = lambda text, special: encoded.append(text) or [1]
    longest = max(map(len, worker.tokenizer.backend.get_vocab()))
    with pytest.raises(ContextLengthError) as caught:
        await small.encode_chat(HELLO, ChatRendering(variables={"extra": "x" * 8 * longest}))
    assert caught.value.param == "messages"
    assert not encoded
    small.close()


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "' + "x" * 600 + '"}'}}


@pytest.mark.parametrize(
    ("messages", "variables"),
    [
        ([{"role": "user", "content": ""}] * 100, {}),
        ([{"role": "assistant", "tool_calls": [CALL]}], {}),
        ([{"role": "assistant", "content": "", "reasoning_content": "x" * 600}], {}),
        ([{"role": "user", "content": "", "name": "x" * 600}], {}),
        ([{"role": "user", "content": ""}], {"tools": [{"function": {"description": "x" * 600}}]}),
    ],
)
async def test_all_of_a_chat_that_may_take_long_counts(worker, messages, variables):
    render, threads = worker.tokenizer.render_chat, []

    def noted(*args, **kwargs):
        threads.append(threading.current_thread())
        return render(*args, **kwargs)

    worker.tokenizer.render_chat = noted
    await worker.encode_chat([ChatMessage(**message) for message in messages], ChatRendering(variables=variables))
    assert threads[0] is not threading.main_thread()
    await worker.encode_chat(HELLO, ChatRendering())
    assert threads[1] is threading.main_thread()


async def test_a_text_longer_than_any_prompt_holds_up_no_prompt():
    go_on = threading.Event()

    class Slow:
        backend = SimpleNamespace(get_vocab=lambda: {"long": 0}, normalizer=None)

        def encode(self, text, add_special_tokens):
            assert len(text) <= 8 * LONG or go_on.wait(60)
            return [1]

    worker = TextWorker(Slow(), vocab_size=10, max_seq_len=2 * LONG)
    try:
        slow = asyncio.ensure_future(worker.encode_text("x" * (8 * LONG + 1)))
        await asyncio.sleep(0)
        assert await asyncio.wait_for(worker.encode("x" * 8 * LONG), 30) == [1]
        assert not slow.done()
        go_on.set()
        assert await slow == [1]
    finally:
        go_on.set()
        worker.close()


@pytest.mark.parametrize("name", ["self", "environment", "args"])
async def test_a_template_variable_may_have_any_name(worker, name):
    plain, _ = await worker.encode_chat(HELLO, ChatRendering())
    assert (await worker.encode_chat(HELLO, ChatRendering(variables={name: 1})))[0] == plain


async def test_token_ids_pass_through(worker):
    assert await worker.encode([499, 0, 7]) == [499, 0, 7]


async def test_a_slow_prompt_stops_neither_the_loop_nor_the_next_prompt():
    go_on = threading.Event()

    class Slow:
        def encode(self, text, add_special_tokens):
            assert text == "short" or go_on.wait(60)
            return [1]

    worker = TextWorker(Slow(), vocab_size=10)
    try:
        slow = asyncio.gather(*(worker.encode("long" * LONG) for _ in range(4)))
        await asyncio.sleep(0)
        assert await asyncio.wait_for(worker.encode("short"), 30) == [1]
        assert not slow.done()
        go_on.set()
        assert await slow == [[1]] * 4
    finally:
        go_on.set()
        worker.close()


async def test_other_threads_run_while_a_long_text_is_encoded(worker):
    text = "".join(random.Random(3).choices("abcdefgh ", k=1_000_000))
    ticks, before, after = 0, 0, 0
    encode, ended = worker.tokenizer.encode, threading.Event()

    def tick():
        nonlocal ticks
        while not ended.wait(0.001):
            ticks += 1

    def encode_between_ticks(*args):
        nonlocal before, after
        before = ticks
        ids = encode(*args)
        after = ticks
        return ids

    worker.tokenizer.encode = encode_between_ticks
    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        ids = await worker.encode(text)
    finally:
        ended.set()
        ticking.join()
    assert worker.tokenizer.decode(ids) == text
    assert after > before  # none could come if the GIL were kept


async def test_a_message_that_is_continued_stays_open(worker):
    messages = [*HELLO, ChatMessage(role="assistant", content="The <|im_end|> is ")]
    _, text = await worker.encode_chat(messages, ChatRendering(continue_final=True))
    assert text == "<s><|im_start|>hello<|im_end|><|im_start|>The <|im_end|> is "


async def test_a_forced_beginning_comes_after_reasoning(worker):
    _, text = await worker.encode_chat(HELLO, ChatRendering(suffix="{", variables={"extra": "<think>\n"}))
    assert text.endswith("<|im_end|><think>\n\n</think>\n\n{")
