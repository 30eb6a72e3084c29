"""What a grammar may be and cost: what is too large, too deep or too slow is refused, or ends its request."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from pydantic import ValidationError

from cluster.default_model import ensure_default_model
from cluster.errors import InvalidRequestError
from cluster.grammar import STEP_SECONDS
from cluster.grammar_compiler import GrammarCompiler
from cluster.serve.messages import Tool
from cluster.serve.output_format import after_reasoning, tool_calls
from cluster.serve.parsers.hermes import HermesParser
from cluster.tokenizer import Tokenizer
from scheduler.constraint import ConstraintError
from scheduler.structured_outputs import MAX_CHOICES, MAX_DEPTH, StructuredOutputs
from tests.unit.cpu_clock import CpuClock
from tests.unit.grammar_walk import MAY_END, MUST_END, REFUSED, UNFINISHED, make_compiler, tokens_of, walk
from tests.unit.tiny_tokenizers import byte_level, sentencepiece_style


@pytest.fixture(scope="module", params=[byte_level, sentencepiece_style])
def compiler(request, tmp_path_factory):
    return make_compiler(request.param, tmp_path_factory.mktemp("tokenizer"))


def nested(levels):
    schema = {}
    for _ in range(levels):
        schema = {"a": schema}
    return schema


def test_a_schema_may_be_as_deep_as_what_pickles_and_compiles_it_bears():
    pickle.dumps(StructuredOutputs(json=nested(MAX_DEPTH)))
    for schema in (nested(MAX_DEPTH + 1), json.dumps(nested(MAX_DEPTH + 1)), {"a": [[nested(MAX_DEPTH)]]}):
        with pytest.raises(ValidationError, match="nested more than 64 levels deep"):
            StructuredOutputs(json=schema)


DEEP_LIST = '{"grammars": [{"a":' + "[" * 5000 + "]" * 5000 + "}]}"


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (DEEP_LIST, "nested too deeply"),
        (json.dumps({"grammars": [{"json_schema": nested(300)}]}), "recursion limit"),
        ('start: %json {"multipleOf": 1' + "0" * 400 + "}", "multipleOf"),
        ('start: %json {"multipleOf": true}', "multipleOf"),
    ],
)
def test_what_cannot_be_read_is_refused(compiler, grammar, message):
    with pytest.raises(InvalidRequestError, match=f"^structured_outputs: .*{message}"):
        compiler.compile(StructuredOutputs(grammar=grammar))


@pytest.mark.parametrize("grammar", [DEEP_LIST, '{"grammars": [1]}', "{}"])
def test_what_cannot_be_read_after_reasoning_is_refused(grammar):
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs: "):
        after_reasoning(StructuredOutputs(grammar=grammar), opened=True)


def test_huge_grammars_end_soon_one_way_or_the_other(compiler):
    wild = compiler.compile(StructuredOutputs(regex="(.*a){40}.{0,900}(b|c){1,5000}"))
    mask = np.zeros(wild.mask_words, dtype=np.int32)
    for token in tokens_of(compiler, "aab" * 20):
        try:
            wild.fill_mask(mask)
            wild.accept([token])
        except ConstraintError as error:
            assert len(str(error)) < 600
            break


NUMBERS = {"a": {"type": "integer", "multipleOf": 50_000}, "b": {"type": "number", "multipleOf": 0.5}}


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "integer", "multipleOf": 999_983}},
        {"json": {"type": "number", "multipleOf": 0.999983}},
        {"json": {"type": "number", "multipleOf": 1e-9}},
        {"json": {"type": "integer", "multipleOf": 1e300}},
        {"json": {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}},
        {"json": {"type": "object", "properties": NUMBERS}},
        {"grammar": 'start: "x" %json  {"type": "integer", "multiple\\u004ff": 999983}'},
        {"grammar": json.dumps({"grammars": [{"json_schema": {"type": "integer", "multipleOf": 999_983}}]})},
    ],
)
def test_what_would_compile_for_minutes_is_refused(compiler, form):
    with pytest.raises(InvalidRequestError, match="multipleOf: "):
        compiler.compile(StructuredOutputs(**form))


def test_multiples_in_use_are_kept(compiler):
    price = {"type": "number", "multipleOf": 0.01, "minimum": 0}
    assert walk(compiler, StructuredOutputs(json=price), "12.25") == MUST_END
    assert walk(compiler, StructuredOutputs(json={"type": "integer", "multipleOf": 25}), "1275") == MAY_END
    assert walk(compiler, StructuredOutputs(json={"type": "integer", "multipleOf": 25}), "1276") == UNFINISHED
    named = {"type": "object", "properties": {"multipleOf": {"type": "string"}}, "required": ["multipleOf"]}
    assert walk(compiler, StructuredOutputs(json=named), '{"multipleOf": "x"}') == MUST_END


def test_as_many_choices_as_are_taken_can_be_chosen_from(compiler):
    choices = StructuredOutputs(choice=[f"number {i} of them" for i in range(MAX_CHOICES)])
    assert walk(compiler, choices, "number 4095 of them") == MUST_END
    assert walk(compiler, choices, "number 4096") == REFUSED
    assert walk(compiler, after_reasoning(choices, opened=False), "number 4095 of them") == MUST_END


def test_a_schema_may_have_hundreds_of_optional_properties(compiler):
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}}
    assert walk(compiler, StructuredOutputs(json=schema), '{"p7": "a", "p299": "b"}') == MUST_END


def test_so_with_a_large_vocabulary():
    """After the first property most others may follow, and each may begin in the same token as the end of its value."""
    tokenizer = Tokenizer(ensure_default_model())
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size + 64, tokenizer.eos_token_ids)
    properties = {f"property_{i}": {"type": "string"} for i in range(300)}
    schema = StructuredOutputs(json={"type": "object", "properties": properties, "additionalProperties": False})
    assert walk(compiler, schema, '{"property_0": "a", "property_1": "b", "property_299": "c"}') == MUST_END


def test_a_mask_of_too_many_alternatives_is_refused(tmp_path):
    compiler = make_compiler(sentencepiece_style, tmp_path)
    letters = " | ".join(f"/[^{letter}]/" for letter in "abcdefghijklmnop")
    with pytest.raises(InvalidRequestError, match="Too many items"):
        compiler.compile(StructuredOutputs(grammar=f"start: a\na: a a a a | a a a | a a | {letters}\n"))


def test_a_request_whose_masks_cost_too_much_is_ended(compiler, monkeypatch):
    letters = StructuredOutputs(regex="[ab]{100000}")
    compiler.compile(letters)
    monkeypatch.setattr("cluster.grammar.time", clock := CpuClock(STEP_SECONDS))
    grammar = compiler.compile(letters)
    mask = np.zeros(grammar.mask_words, dtype=np.int32)
    [token] = tokens_of(compiler, "a")

    def steps(count):
        for _ in range(count):
            grammar.fill_mask(mask)
            grammar.accept([token])

    steps(1000)  # 10 s
    clock.cost = 0.0
    steps(100)  # what cheap ones leave is not saved up
    grammar.accept([token] * 100)
    clock.cost = 0.2 + STEP_SECONDS
    grammar.fill_mask(mask)
    grammar.accept([token] * 2)
    clock.cost = 0.0
    steps(100)  # but what dear ones took is forgotten in time
    clock.cost = 0.2 + STEP_SECONDS
    with pytest.raises(ConstraintError, match=r"1\.2 s beyond 5 ms each, 1 s beyond is the limit"):
        steps(10)
    compiler.compile(letters).fill_mask(mask)  # another request with the same grammar has its own account


def test_an_integer_beyond_64_bits_is_refused(compiler):
    schema = {"type": "integer", "minimum": 1 << 64}
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs: .*64 bits"):
        compiler.compile(StructuredOutputs(json=schema))
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}})
    with pytest.raises(InvalidRequestError, match=r"^tools: .*64 bits"):
        tool_calls([tool], HermesParser, "f", False)
