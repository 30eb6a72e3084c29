"""Tool calls and reasoning: the same result whatever the pieces in which the text comes."""

from __future__ import annotations

import json
import random

import pytest

from cluster.serve.parsers import TOOL_PARSERS, ReasoningParser, choose_tool_parser, has_reasoning

NAMES = ("get_weather", "add")


def pieces(text, seed):
    """The text cut at random places; seed 0: whole, 1: character by character."""
    if seed < 2:
        return [text] if seed == 0 else list(text)
    rng, cut = random.Random(seed), []
    while text:
        size = rng.randint(1, 9)
        cut.append(text[:size])
        text = text[size:]
    return cut


def parse(kind, parts):
    """(content, [(name, arguments)]) of an answer in parts; checks the deltas' form."""
    parser = TOOL_PARSERS[kind](NAMES)
    content, calls = "", []
    for number, part in enumerate([*parts, ""]):
        more, deltas = parser.feed(part, final=number == len(parts))
        content += more
        for delta in deltas:
            if delta.name is not None:
                assert delta.index == len(calls)
                calls.append([delta.name, ""])
            assert delta.index == len(calls) - 1
            calls[-1][1] += delta.arguments
    assert parser.calls == len(calls)
    return content, [tuple(call) for call in calls]


WEATHER = '{"city": "Paris </tool_call> \\"x\\" {", "days": [1, {"a": 2}]}'
HERMES = [
    ("Hello there.", "Hello there.", []),
    ("a < b <tool", "a < b <tool", []),
    ("text at the end \n", "text at the end \n", []),
    (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        "",
        [("get_weather", WEATHER)],
    ),
    (
        'Let me see.\n<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "get_weather"}</tool_call>\n',
        "Let me see.",
        [("add", '{"a":1}'), ("get_weather", "{}")],
    ),
    ('<tool_call>{"name": "add"}</tool_call> done', "done", [("add", "{}")]),
    ('<tool_call>{"name": "add", "arguments": null, "id": 3}</tool_call>', "", [("add", "{}")]),
    ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    ('<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),  # cut off
    (
        '<tool_call>{"name": "add", "arguments": {}}<tool_call>{"name": "add", "arguments": {"b": 2}}',
        "",
        [("add", "{}"), ("add", '{"b": 2}')],
    ),
    # no calls: unknown function, no JSON, no name
    *[
        (text, text, [])
        for text in (
            '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
            "<tool_call>no JSON</tool_call>",
            '<tool_call>{"arguments": {"a": 1}}</tool_call>',
            '<tool_call>{"name": 5}</tool_call>',
            '<tool_call>{"na',
            "<tool_call>",
        )
    ],
]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("text", "content", "calls"), HERMES)
def test_hermes(text, content, calls, seed):
    assert parse("hermes", pieces(text, seed)) == (content, calls)


LLAMA3 = [
    ("Hello {x}; there.", "Hello {x}; there.", []),
    ("<| what", "<| what", []),
    (f'{{"name": "get_weather", "parameters": {WEATHER}}}', "", [("get_weather", WEATHER)]),
    (' <|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (
        '{"name": "add", "parameters": {"a": 1}}; {"name": "get_weather", "arguments": {}}\n',
        "",
        [("add", '{"a": 1}'), ("get_weather", "{}")],
    ),
    ('{"name": "add", "parameters": {"a": 1}} and then', " and then", [("add", '{"a": 1}')]),
    *[(text, text, []) for text in ('{"name": "rm", "parameters": {}}', '{"a": 1}', '{"na', "{not JSON}", "  ", "")],
]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("text", "content", "calls"), LLAMA3)
def test_llama3(text, content, calls, seed):
    assert parse("llama3_json", pieces(text, seed)) == (content, calls)


@pytest.mark.parametrize("kind", TOOL_PARSERS)
def test_a_forced_beginning_is_a_call(kind):
    parser = TOOL_PARSERS[kind]
    named = parser.prefix("add") + '{"a": 1}}'
    assert parse(kind, [named]) == ("", [("add", '{"a": 1}')])
    key = json.loads(parser.prefix("add").removeprefix("<tool_call>") + "1}").keys() - {"name"}
    any_function = parser.prefix(None) + f'get_weather", "{key.pop()}": {{"b": 2}}}}'
    assert parse(kind, [any_function]) == ("", [("get_weather", '{"b": 2}')])


def test_arguments_stream_as_they_come():
    parser = TOOL_PARSERS["hermes"](NAMES)
    parser.feed('<tool_call>{"name": "add", "arguments": {"te')
    assert [delta.arguments for delta in parser.feed('xt": "abc')[1]] == ['xt": "abc']


REASONED = [
    ("<think>\nhm, so\n\n</think>\n\nParis.\n", False, "hm, so", "Paris.\n"),
    ("\n<think></think>Paris", False, "", "Paris"),
    ("hm </thin k> x </think> Paris", True, "hm </thin k> x", "Paris"),
    ("Paris <think>", False, "", "Paris <think>"),
    (" <thing>", False, "", " <thing>"),
    ("<think>never ends", False, "never ends", ""),
    ("<thi", False, "", "<thi"),
    ("", True, "", ""),
]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("text", "opened", "reasoning", "rest"), REASONED)
def test_reasoning(text, opened, reasoning, rest, seed):
    parser = ReasoningParser(opened)
    parts = [parser.feed(part) for part in pieces(text, seed)] + [parser.feed("", final=True)]
    assert ("".join(part[0] for part in parts), "".join(part[1] for part in parts)) == (reasoning, rest)


@pytest.mark.parametrize(
    ("name", "template", "kind"),
    [
        ("auto", "{{ tools }} <tool_call>", "hermes"),
        ("auto", '{{ tools }} <|start_header_id|> {"name": x, "parameters": y}', "llama3_json"),
        ("auto", "{{ tools }} [TOOL_CALLS]", None),
        ("auto", "<tool_call>", None),
        ("hermes", "{{ tools }}", "hermes"),
        ("hermes", "{{ messages }}", None),
        ("none", "{{ tools }} <tool_call>", None),
        ("auto", None, None),
    ],
)
def test_the_template_chooses_the_parser(name, template, kind):
    assert choose_tool_parser(name, template) is (None if kind is None else TOOL_PARSERS[kind])


def test_reasoning_is_known_from_the_template():
    assert has_reasoning("auto", "... </think> ...")
    assert not has_reasoning("auto", "{{ messages }}")
    assert has_reasoning("think", None)
    assert not has_reasoning("none", "</think>")
