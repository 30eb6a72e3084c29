"""Whatever the split into tokens and calls: the deltas are the full text, whole characters, cut at the stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.detokenizer import IncrementalDetokenizer, StopStrings
from cluster.errors import ModelLoadError
from cluster.tokenizer import Tokenizer
from tests.unit import tiny_tokenizers
from tests.unit.work import lines_run, peak_bytes

texts = st.text(
    st.one_of(
        st.sampled_from("abc stop\n\t 0123.,"),
        st.sampled_from("日本語テキスト漢字한국어"),
        st.sampled_from("😀👩‍👩‍👧‍👦🏳️‍🌈é\u0301\u0308ñ\u200d\ufe0f\u0e33ﷺ"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=60,
)
stops = st.lists(st.text("ab日😀 ", min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece_style"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return Tokenizer(getattr(tiny_tokenizers, request.param)(tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.sentencepiece_style(tmp_path_factory.mktemp("sentencepiece")))


def pieces(data, items):
    """`items` cut into consecutive parts at drawn places."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=8), label="cuts"))
    return [items[a:b] for a, b in zip([0, *cuts], [*cuts, len(items)], strict=True)]


def run(detokenizer, parts):
    """The deltas of all parts; the last part comes with `finished`."""
    return [detokenizer.add(part, finished=n == len(parts) - 1) for n, part in enumerate(parts)]


@given(text=texts, data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_split_gives_the_full_decode(tokenizer, text, data):
    ids = tokenizer.encode(text)
    deltas = run(IncrementalDetokenizer(tokenizer), pieces(data, ids))
    assert "".join(delta.text for delta in deltas) == tokenizer.decode(ids)


@given(text=texts)
@settings(max_examples=200, deadline=None)
def test_token_by_token_never_shows_half_a_character(tokenizer, text):
    text = text.replace("\ufffd", "")
    detokenizer, seen = IncrementalDetokenizer(tokenizer), ""
    ids = tokenizer.encode(text)
    for id in ids:
        seen += detokenizer.add([id]).text
        assert "\ufffd" not in seen and tokenizer.decode(ids).startswith(seen)


@given(ids=st.lists(st.integers(0, 420), max_size=80), data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_byte_level_ids_give_the_full_decode(byte_level, ids, data, skip):
    """Random ids: invalid UTF-8, special and added tokens, ids beyond the vocabulary."""
    deltas = run(IncrementalDetokenizer(byte_level, skip_special_tokens=skip), pieces(data, ids))
    assert "".join(delta.text for delta in deltas) == byte_level.decode(ids, skip_special_tokens=skip)


@given(text=st.text("ab日😀 x", max_size=40), stop=stops, data=st.data())
@settings(max_examples=500, deadline=None)
def test_stop_strings_cut_exactly_whatever_the_split(tokenizer, text, stop, data):
    ids = tokenizer.encode(text)
    full = tokenizer.decode(ids)
    ends = [(full.find(s) + len(s), full.find(s), s) for s in stop if s in full]
    deltas = run(IncrementalDetokenizer(tokenizer, stop=stop), pieces(data, ids))
    got = "".join(delta.text for delta in deltas)
    stopped = [delta for delta in deltas if delta.stopped]
    if ends:
        _, start, which = min(ends)
        assert got == full[:start] and [delta.stop_reason for delta in stopped] == [which]
    else:
        assert got == full and not stopped


@given(text=st.text("ab日😀 x", max_size=40), stop=stops, min_tokens=st.integers(0, 30), data=st.data())
@settings(max_examples=500, deadline=None)
def test_stop_strings_end_after_the_least_number_of_tokens(tokenizer, text, stop, min_tokens, data):
    ids = tokenizer.encode(text)
    full = tokenizer.decode(ids)
    early = len(IncrementalDetokenizer(tokenizer).add(ids[:min_tokens]).text) if min_tokens else 0
    places = [(start + len(s), start, s) for s in stop for start in range(len(full)) if full.startswith(s, start)]
    ends = [place for place in places if place[0] > early]
    deltas = run(IncrementalDetokenizer(tokenizer, stop=stop, min_tokens=min_tokens), pieces(data, ids))
    got = "".join(delta.text for delta in deltas)
    if ends:
        _, start, which = min(ends)
        assert got == full[:start] and [delta.stop_reason for delta in deltas if delta.stopped] == [which]
    else:
        assert got == full and not any(delta.stopped for delta in deltas)


def test_a_stop_string_may_begin_before_the_least_number_of_tokens(byte_level):
    ids = [byte_level.backend.token_to_id(letter) for letter in "abab"]
    for min_tokens, expected in [(0, ""), (1, ""), (2, "ab"), (3, "ab"), (4, "abab")]:
        deltas = run(IncrementalDetokenizer(byte_level, stop=["ab"], min_tokens=min_tokens), [[id] for id in ids])
        assert "".join(delta.text for delta in deltas) == expected


@given(text=st.text("ab", max_size=30), stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_only_what_may_begin_a_stop_string_is_held_back(text, stop):
    matcher, sent, seen = StopStrings(stop), "", ""
    for character in text:
        seen += character
        new, reason = matcher.add(character, finished=False)
        sent += new
        if reason is not None:
            return
        held = seen[len(sent) :]
        assert not held or any(s.startswith(held) for s in stop)


def test_stop_that_completes_first_wins_then_the_longest():
    assert StopStrings(["abcd", "bc"]).add("xabcd", finished=True) == ("xa", "bc")
    assert StopStrings(["bc", "abc"]).add("xabc", finished=True) == ("x", "abc")
    assert StopStrings([]).add("text", finished=False) == ("text", None)
    assert StopStrings([""]).add("text", finished=False) == ("text", None)


def test_stop_token_is_no_text_and_special_tokens_show_on_request(byte_level):
    ids = [*byte_level.encode("now"), byte_level.encode("!")[0], byte_level.backend.token_to_id("</s>")]
    assert IncrementalDetokenizer(byte_level).add(ids, finished=True).text == "now!"
    shown = IncrementalDetokenizer(byte_level, skip_special_tokens=False)
    assert shown.add(ids, finished=True).text == "now!</s>"
    cut = IncrementalDetokenizer(byte_level, stop_token_ids=[ids[-2]])
    assert cut.add(ids[:-2]).text + cut.add([ids[-2]], finished=True).text == "now"


def test_after_the_end_nothing_comes(byte_level):
    detokenizer = IncrementalDetokenizer(byte_level, stop=["STOP"])
    assert detokenizer.add(byte_level.encode("now STOP here")).text == "now "
    assert detokenizer.add(byte_level.encode("more"), finished=True).text == ""


def test_half_a_character_at_the_end_becomes_a_replacement_character(tokenizer):
    ids = tokenizer.encode("ab😀")[:-1]
    assert IncrementalDetokenizer(tokenizer).add(ids, finished=True).text.startswith("ab\ufffd")


def test_leading_space_is_kept_when_the_tokens_continue_a_text(sentencepiece):
    ids = sentencepiece.encode("hello")
    assert IncrementalDetokenizer(sentencepiece).add(ids, finished=True).text == "hello"
    assert IncrementalDetokenizer(sentencepiece, continues_text=True).add(ids, finished=True).text == " hello"


def test_cost_per_token_does_not_grow_with_the_text(byte_level):
    """Invalid bytes forever: the case where looking back for a character's beginning would be quadratic."""
    byte = byte_level.backend.token_to_id("Ģ")  # the byte 0x80 on its own
    detokenizer = IncrementalDetokenizer(byte_level, stop=["😀"])

    def some_more() -> None:
        for _ in range(100):
            detokenizer.add([byte])

    some_more()
    lines, memory = lines_run(some_more), peak_bytes(some_more)
    for _ in range(200):
        some_more()
    assert lines_run(some_more) == lines
    assert peak_bytes(some_more) <= memory + 8192  # the text has grown by 60 KB; a stray list or two is no growth


def test_unknown_decoder_is_refused_by_name(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    path = tiny_tokenizers.save(backend, tmp_path / "wordpiece")
    with pytest.raises(ModelLoadError, match="WordPiece"):
        IncrementalDetokenizer(Tokenizer(path))
