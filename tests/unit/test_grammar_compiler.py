"""Grammars as token masks, on tokenizers of both kinds: what each form accepts, refuses, and how it ends."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.errors import InvalidRequestError
from cluster.grammar_compiler import CACHED_GRAMMARS, GrammarCompiler
from cluster.serve.messages import Tool
from cluster.serve.output_format import OutputFormat, after_reasoning, tool_calls
from cluster.serve.parsers.hermes import HermesParser
from cluster.serve.parsers.llama3 import Llama3Parser
from cluster.tokenizer import Tokenizer
from scheduler.constraint import ConstraintError
from scheduler.structured_outputs import StructuredOutputs
from tests.unit.grammar_walk import MAY_END, MUST_END, REFUSED, UNFINISHED, make_compiler, tokens_of, walk
from tests.unit.tiny_tokenizers import byte_level, sentencepiece_style

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}}, "required": ["city"]}
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": "get_weather", "parameters": CITY}}),
    Tool.model_validate({"type": "function", "function": {"name": "get_time"}}),
]


@pytest.fixture(scope="module", params=[byte_level, sentencepiece_style])
def compiler(request, tmp_path_factory):
    return make_compiler(request.param, tmp_path_factory.mktemp("tokenizer"))


SUM_GBNF = 'root ::= digit ("+" digit)*\ndigit ::= [0-9]\n'
SUM_LARK = 'start: DIGIT ("+" DIGIT)*\nDIGIT: /[0-9]/\n'


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ({"json": CITY}, '{"city": "Roma"}', MUST_END),
        ({"json": json.dumps(CITY)}, '{\n  "city" :\t"é"}', MUST_END),
        ({"json": CITY}, '{"city": "Romans"}', REFUSED),
        ({"json": CITY}, '{"city": 5}', REFUSED),
        ({"json": CITY}, "{" + "\n" * 20, UNFINISHED),
        ({"json": CITY}, "{" + "\n" * 21, REFUSED),
        ({"json": {"enum": ["a", 1, None]}}, "null", MUST_END),
        ({"json_object": True}, '{"any": {"thing": [1, 2.5e3, true]}}', MUST_END),
        ({"json_object": True}, "[]", REFUSED),
        ({"regex": "[0-9]{2}/[a-c]*"}, "42/abc", MAY_END),
        ({"regex": "[0-9]{2}"}, "42", MUST_END),
        ({"regex": "a|é"}, "é", MUST_END),
        ({"choice": ["yes", "yes, please", '"no"\n', "😀"]}, "yes", MAY_END),
        ({"choice": ["yes", "yes, please", '"no"\n', "😀"]}, '"no"\n', MUST_END),
        ({"choice": ["yes", "😀"]}, "😀", MUST_END),
        ({"grammar": SUM_GBNF}, "1+2+3", MAY_END),
        ({"grammar": SUM_LARK}, "1+2+", UNFINISHED),
    ],
)
def test_what_a_form_accepts(compiler, form, text, expected):
    assert walk(compiler, StructuredOutputs(**form), text) == expected


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": {"type": "strin"}}, "Invalid type"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "http://example.com/schema"}}, "not present"),
        ({"regex": "a("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: other"}, "unknown name"),
        ({"grammar": "just words"}, "neither Lark's nor GBNF's"),
        ({"grammar": "root ::= ("}, "neither Lark's nor GBNF's"),
        ({"grammar": "{}"}, "grammars"),
    ],
)
def test_what_is_wrong_is_said_and_by_whom(compiler, form, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        compiler.compile(StructuredOutputs(**form))
    assert caught.value.param == "structured_outputs"
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(OutputFormat.of("response_format", **form))
    assert caught.value.param == "response_format" and str(caught.value).startswith("response_format: ")


def test_without_llguidance_only_constrained_requests_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    tokenizer = Tokenizer(byte_level(tmp_path))
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (0,))
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs: .*llguidance"):
        compiler.compile(StructuredOutputs(regex="a"))


def test_a_grammar_that_takes_long_holds_up_no_other(compiler, monkeypatch):
    build, begun, go_on = compiler._build, threading.Event(), threading.Event()

    def build_slowly(text):
        if "slow" in text:
            begun.set()
            assert go_on.wait(20)
        return build(text)

    monkeypatch.setattr(compiler, "_build", build_slowly)
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(compiler.compile, StructuredOutputs(choice=["slow"]))
        try:
            assert begun.wait(20)
            threads.submit(compiler.compile, StructuredOutputs(choice=["fast"])).result(20)
            assert not slow.done()
        finally:
            go_on.set()
        slow.result(20)


def test_a_token_that_is_not_allowed_is_an_error(compiler):
    grammar = compiler.compile(StructuredOutputs(regex="[0-9]+"))
    grammar.accept(tokens_of(compiler, "12"))
    with pytest.raises(ConstraintError, match="cannot go on"):
        grammar.accept(tokens_of(compiler, "x"))


def test_equal_forms_are_compiled_once_and_do_not_share_their_place(compiler):
    first, second = (compiler.compile(StructuredOutputs(regex="ab")) for _ in range(2))
    first.accept(tokens_of(compiler, "ab"))
    assert first.is_complete and not second.is_complete
    for number in range(CACHED_GRAMMARS + 5):
        compiler.compile(StructuredOutputs(choice=[f"c{number}"]))
    assert len(compiler._cache) == CACHED_GRAMMARS


ANSWER = '{"city": "Roma"}'
TWO_CALLS = (
    'get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}'
)
LLAMA_CALLS = 'get_weather", "parameters": {"city": "Rome"}}; {"name": "get_time", "parameters": {}}'


@pytest.mark.parametrize(
    ("parser", "name", "several", "text", "expected"),
    [
        (HermesParser, "get_weather", False, ' {"city": "Rome"}}', MUST_END),
        (HermesParser, "get_weather", False, ' {"town', REFUSED),
        (HermesParser, None, False, 'get_time", "arguments": {}}', MUST_END),
        (HermesParser, None, False, "get_news", REFUSED),
        (HermesParser, None, True, TWO_CALLS, MAY_END),
        (HermesParser, None, True, TWO_CALLS + "\n</tool_call>", MAY_END),
        (HermesParser, "get_weather", True, TWO_CALLS[len('get_weather", "arguments":') :], MAY_END),
        (Llama3Parser, None, True, LLAMA_CALLS, MAY_END),
        (Llama3Parser, None, True, LLAMA_CALLS + "; x", REFUSED),
    ],
)
def test_required_calls(compiler, parser, name, several, text, expected):
    assert walk(compiler, tool_calls(TOOLS, parser, name, several), text) == expected
    if expected != REFUSED:
        reader = parser([tool.function.name for tool in TOOLS])
        reader.feed(parser.prefix(name))
        content, deltas = reader.feed(text, final=True)
        assert not content and reader.calls == (2 if several else 1)
        assert "".join(delta.arguments for delta in deltas).startswith("{")


def test_a_bad_schema_of_a_tool_blames_the_tools(compiler):
    function = {"name": "f", "parameters": {"type": 3}}
    tools = [Tool.model_validate({"type": "function", "function": function})]
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(tool_calls(tools, HermesParser, None, True))
    assert caught.value.param == "tools"


@pytest.mark.parametrize("form", [{"json": CITY}, {"regex": r'\{"city": "Roma"\}'}, {"choice": [ANSWER]}])
def test_a_form_begins_after_reasoning(compiler, form):
    thoughts = 'Let {"me}" think.\n</think>'
    opened = after_reasoning(StructuredOutputs(**form), opened=True)
    assert walk(compiler, opened, f"{thoughts}\n\n{ANSWER}") == MUST_END
    assert walk(compiler, opened, ANSWER) == UNFINISHED  # still thinking
    free = after_reasoning(StructuredOutputs(**form), opened=False)
    for text in (ANSWER, f"<think>\n{thoughts}{ANSWER}"):
        assert walk(compiler, free, text) == MUST_END
    assert walk(compiler, free, "Let me think") == REFUSED


def test_a_grammar_of_the_user_begins_after_reasoning(compiler):
    for grammar in (SUM_GBNF, SUM_LARK):
        text = "<think>hm</think>1+2"
        form = after_reasoning(StructuredOutputs(grammar=grammar), opened=False)
        assert walk(compiler, form, text) == MAY_END
    with pytest.raises(InvalidRequestError, match="neither") as caught:
        after_reasoning(StructuredOutputs(grammar="nothing"), opened=False)
    assert caught.value.param == "structured_outputs"
