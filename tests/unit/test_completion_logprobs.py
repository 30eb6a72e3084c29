"""`logprobs` of a completion: names of tokens, and where they begin in the text that the client gets."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.detokenizer import IncrementalDetokenizer
from cluster.serve.completions import CompletionText
from cluster.serve.logprobs import LogprobWriter
from cluster.serve.protocol import CompletionRequest
from cluster.serve.service import Choice
from cluster.serve.token_stream import Delta, TokenStream
from cluster.tokenizer import Tokenizer
from scheduler.outputs import FinishReason
from scheduler.step import LogprobBlock
from tests.unit import tiny_tokenizers


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece_style"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return Tokenizer(getattr(tiny_tokenizers, request.param)(tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("byte_level")))


def block(own: float, *top: tuple[int, float]) -> LogprobBlock:
    """What is known of one token: its own log probability and (id, log probability) of the likeliest."""
    logprobs = np.array([own, *(logprob for _, logprob in top)], dtype=np.float32).view(np.int32)
    return LogprobBlock(np.array([[1, logprobs[0], *(token for token, _ in top), *logprobs[1:]]], dtype=np.int32))


class Answer:
    """A completion of these tokens (or (token, block)), as a stream and whole."""

    def __init__(self, tokenizer: Tokenizer, tokens, stop=(), prompt=(1,), echo="", **fields) -> None:
        request = CompletionRequest(prompt="x", logprobs=0, echo=bool(echo), **fields)
        service = SimpleNamespace(logprobs=LogprobWriter(tokenizer), text=SimpleNamespace(tokenizer=tokenizer))
        scored = [token if isinstance(token, tuple) else (token, block(-1.0)) for token in tokens]
        skip_special = request.skip_special_tokens is not False
        detokenizer = IncrementalDetokenizer(tokenizer, stop, skip_special, continues_text=True)
        stream, choice = TokenStream(1, detokenizer, None, 0, 0.0, top_logprobs=20), Choice()
        choice.prompt_logprobs = LogprobBlock.joined([block(-1.0)] * (len(prompt) - 1), 0)
        sent = CompletionText(service, request, list(prompt), echo)
        begin = sent.begin(choice.prompt_logprobs)
        self.text = echo
        self.streamed: list[int] = [] if begin is None else begin[0]["text_offset"]
        for place, (token, scores) in enumerate(scored):
            finish = FinishReason.LENGTH if place == len(scored) - 1 else FinishReason.NONE
            delta: Delta | None = stream.advance(token, finish, 0, None, scores)
            if delta is None:
                continue
            choice.add(delta)
            self.text += delta.text
            offsets = sent.scores(delta.text, delta.logprobs, delta.is_last)["text_offset"]
            assert all(offset <= len(self.text) for offset in offsets)
            self.streamed += offsets
            if delta.is_last:
                break
        whole = CompletionText(service, request, list(prompt), echo).whole(0, choice)
        assert whole.text == self.text
        self.logprobs = whole.logprobs
        self.offsets = whole.logprobs["text_offset"]


def each_byte(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of the text's single bytes."""
    table = {tokenizer.token_bytes[token]: token for token in range(tokenizer.vocab_size)}
    return [table[bytes([byte])] for byte in text.encode()]


def test_halves_of_characters_have_names_and_no_length(byte_level):
    parts = each_byte(byte_level, "a😀b\\")
    scored = [(token, block(-1.0, (token, -1.0), *((other, -2.0) for other in parts[:3]))) for token in parts]
    answer = Answer(byte_level, scored)
    names = ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "b", "\\"]
    assert answer.logprobs["tokens"] == names
    assert answer.offsets == answer.streamed == [0, 1, 1, 1, 1, 2, 3]
    for name, top in zip(names, answer.logprobs["top_logprobs"], strict=True):
        assert top == dict.fromkeys(names[:3], -2.0) | {name: -1.0}
        assert next(iter(top)) == name


def test_a_token_is_itself_among_others_of_its_name(tokenizer):
    table = tokenizer.token_bytes
    table._table = dict.fromkeys((100, 101, 102), b"a")
    try:
        answer = Answer(tokenizer, [(101, block(-3.0, (100, -1.0), (102, -2.0))), (100, block(-1.0, (100, -1.0)))])
        assert answer.logprobs["top_logprobs"] == [{"a": -3.0}, {"a": -1.0}]
    finally:
        table._table = {}


def test_a_special_token_counts_where_the_text_has_it(byte_level):
    special, hi = byte_level.backend.token_to_id("<|im_end|>"), byte_level.encode("hello")
    tokens = [*hi, special, *hi]
    assert Answer(byte_level, tokens).offsets[len(hi) :] == [
        5,
        *Answer(byte_level, hi, echo="hello").offsets[len(hi) :],
    ]
    shown = Answer(byte_level, tokens, skip_special_tokens=False)
    assert (shown.text[5:15], shown.offsets[len(hi) + 1]) == ("<|im_end|>", 15)


@pytest.mark.parametrize("stop", ["STOP now", "capital of Spain", "aab", "hello"])
def test_offsets_with_a_stop_string_end_at_the_text_s_end(tokenizer, stop):
    tokens = tokenizer.encode("hello world STOP STOP now, The capital of France aaaaaab") * 2
    answer = Answer(tokenizer, tokens, stop=[stop])
    unstopped = Answer(tokenizer, tokens).offsets
    assert answer.offsets == answer.streamed
    assert answer.offsets == [min(offset, len(answer.text)) for offset in unstopped[: len(answer.offsets)]]


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=30),
    st.lists(st.text("ab日 e", min_size=1, max_size=3), max_size=2),
    st.booleans(),
)
def test_offsets_streamed_and_whole_are_those_of_the_text(tokenizer, tokens, stop, skip):
    tokens = [token % tokenizer.vocab_size for token in tokens]
    answer = Answer(tokenizer, tokens, stop=stop, skip_special_tokens=skip)
    assert answer.offsets == answer.streamed == sorted(answer.offsets)
    if stop:
        return
    for place, token in enumerate(tokens):
        before = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, continues_text=True).add(tokens[:place])
        assert answer.text[: answer.offsets[place]] == before.text, token


# ------------------------------------------------------------------------------------------------------------- echo


def test_the_offsets_of_an_echo_are_those_of_the_text(tokenizer):
    text = "hello world, naïve 日本語 now"
    tokens = tokenizer.encode(text)
    bos = tokenizer.backend.token_to_id("<s>")
    for prompt in (tokens, [bos, *tokens], [bos, *tokens, bos]):
        answer = Answer(tokenizer, tokens[:2], prompt=prompt, echo=text)
        assert answer.offsets == answer.streamed
        places = answer.offsets[: len(prompt)]
        assert places[prompt.index(tokens[0])] == 0
        for place, token in enumerate(prompt[:-1]):
            piece = text[places[place] : places[place + 1]]
            name = tokenizer.token_bytes[token].decode(errors="ignore")
            if token == bos:
                assert piece == ""
            elif name.strip():
                assert piece == name or (place < 2 and piece == name[1:])
        assert answer.offsets[len(prompt)] == len(text)


def test_a_special_token_that_was_written_in_the_prompt_counts(tokenizer):
    text = "hello<|im_end|>world"
    answer = Answer(tokenizer, tokenizer.encode("now"), prompt=tokenizer.encode(text), echo=text)
    mark = tokenizer.encode(text).index(tokenizer.backend.token_to_id("<|im_end|>"))
    assert answer.offsets[mark : mark + 2] == [5, 15]
    assert answer.offsets[len(tokenizer.encode(text))] == len(text)
    ids = tokenizer.encode(text)
    skipped = tokenizer.decode(ids, skip_special_tokens=True)
    assert Answer(tokenizer, [5], prompt=ids, echo=skipped).offsets[mark : mark + 2] == [5, 5]
