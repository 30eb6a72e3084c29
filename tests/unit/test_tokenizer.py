"""Encoding, the chat template as transformers renders it, where EOS comes from, and many threads at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.chat_template import ChatTemplate
from cluster.errors import InvalidRequestError, ModelLoadError
from cluster.tokenizer import Tokenizer
from tests.unit import tiny_tokenizers

CHATML = (
    "{% for message in messages %}\n"
    "    {%- if loop.first and message.role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}\n"
    "<|im_start|>{{ message['role'] }}\n{{ message.content | trim }}<|im_end|>\n"
    "{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{% if messages | length > 3 %}{{ raise_exception('too many messages: ' ~ messages | length) }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% generation %}{% endgeneration %}{% endif %}{{ bos_token }}"
)
MESSAGES = [{"role": "user", "content": " hello <b> & 日本 "}, {"role": "assistant", "content": "hi"}]


@pytest.fixture
def path(tmp_path) -> Path:
    return tiny_tokenizers.byte_level(tmp_path / "model")


def rewrite(path: Path, name: str, **values: object) -> None:
    """Adds keys to a JSON file, which may not exist yet."""
    file = path / name
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(old | values))


def test_encode_and_decode(path):
    tokenizer = Tokenizer(path)
    ids = tokenizer.encode("hello 日本<|im_end|>")
    assert tokenizer.decode(ids) == "hello 日本"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello 日本<|im_end|>"
    assert tokenizer.decode([*ids, 10**6]) == "hello 日本"


@pytest.mark.parametrize("kwargs", [{}, {"add_generation_prompt": False}, {"tools": [{"name": "a<b", "é": [1, 2]}]}])
def test_chat_template_renders_as_in_transformers(path, kwargs):
    from transformers import PreTrainedTokenizerFast

    rewrite(path, "tokenizer_config.json", chat_template=CHATML)
    theirs = PreTrainedTokenizerFast.from_pretrained(path)
    options = {"add_generation_prompt": True} | kwargs
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
    tokenizer = Tokenizer(path)
    assert tokenizer.render_chat(MESSAGES, **kwargs) == expected
    assert tokenizer.apply_chat_template(MESSAGES, **kwargs) == theirs.encode(expected, add_special_tokens=False)


def test_chat_template_sources(path):
    assert Tokenizer(path).chat_template is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        Tokenizer(path).apply_chat_template(MESSAGES)
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D{{ eos_token }}"}]
    rewrite(path, "tokenizer_config.json", chat_template=several, eos_token={"content": "</s>", "special": True})
    assert Tokenizer(path).render_chat(MESSAGES) == "D</s>"
    (path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer(path).render_chat(MESSAGES) == "from the file"


def test_chat_template_errors(path):
    with pytest.raises(ModelLoadError, match="not valid"):
        ChatTemplate("{% if %}", {})
    template = ChatTemplate(CHATML, {})
    with pytest.raises(InvalidRequestError, match="too many messages: 4"):
        template.render(MESSAGES * 2)
    sandboxed = ChatTemplate("{{ ''.__class__.__mro__ }}", {})
    with pytest.raises(InvalidRequestError):
        sandboxed.render(MESSAGES)


@pytest.mark.parametrize("value", ["2", 1.0, True, [2, "x"], -1, 1 << 31, {"a": 1}])
def test_an_eos_that_is_no_token_id_is_refused(path, value):
    rewrite(path, "generation_config.json", eos_token_id=value)
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: eos_token_id: .* is not a token id"):
        _ = Tokenizer(path).eos_token_ids


def test_json_that_is_no_object_is_refused(path):
    (path / "generation_config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: it is not a JSON object"):
        _ = Tokenizer(path).eos_token_ids


def test_eos_comes_from_generation_config_then_tokenizer_then_config(path):
    rewrite(path, "config.json", eos_token_id=9)
    assert Tokenizer(path).eos_token_ids == (1,)  # "</s>" of tokenizer_config.json
    rewrite(path, "generation_config.json", eos_token_id=[3, 7, 3])
    assert Tokenizer(path).eos_token_ids == (3, 7)
    rewrite(path, "generation_config.json", eos_token_id=3)
    assert Tokenizer(path).eos_token_ids == (3,)
    (path / "generation_config.json").unlink()
    rewrite(path, "tokenizer_config.json", eos_token=None)
    assert Tokenizer(path).eos_token_ids == (9,)


def test_without_tokenizer_files(tmp_path):
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot read"):
        Tokenizer(tmp_path)


def test_padding_and_truncation_of_the_file_are_not_used(path):
    backend = Tokenizer(path).backend
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(path / "tokenizer.json"))
    text = "hello world, hello there"
    ids = Tokenizer(path).encode(text)
    assert 2 < len(ids) < 64 and Tokenizer(path).decode(ids) == text


def test_many_threads_at_once(path):
    rewrite(path, "tokenizer_config.json", chat_template=CHATML)
    tokenizer = Tokenizer(path)
    texts = [f"hello {n} 日本 " * (n % 7 + 1) for n in range(400)]

    def both_ways(text: str) -> tuple[str, list[int]]:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return tokenizer.decode(tokenizer.encode(text)), chat

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(both_ways, texts))
    assert together == [both_ways(text) for text in texts]
    assert [text for text, _ in together] == texts
