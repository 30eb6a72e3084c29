"""What a chat request asks of its streams."""

from __future__ import annotations

import pytest

from cluster.config import EngineConfig
from cluster.serve.chat import chat_completion
from cluster.serve.protocol import ChatCompletionRequest
from cluster.serve.service import Service
from cluster.serve.text import TextWorker
from cluster.tokenizer import Tokenizer
from tests.unit import tiny_tokenizers

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the"}]


class Opened(Exception):
    """Ends a request where the engine would begin."""


class Engine:
    def open(self, requests, options):
        raise Opened(options)


@pytest.mark.parametrize("continues", [None, False, True])
async def test_a_message_that_is_continued_keeps_the_space_before_its_next_word(tmp_path, continues):
    tokenizer = Tokenizer(tiny_tokenizers.sentencepiece_style(tmp_path))
    path = tiny_tokenizers.save(tokenizer.backend, tmp_path, chat_template=TEMPLATE)
    text = TextWorker(Tokenizer(path), tokenizer.vocab_size, 64)
    service = Service("m", 64, Engine(), text, EngineConfig(), None)
    request = ChatCompletionRequest(messages=MESSAGES, continue_final_message=continues)
    with pytest.raises(Opened) as caught:
        await chat_completion(service, request, 0.0)
    assert caught.value.args[0].continues_text == bool(continues)
    text.close()
