"""An answer's deltas: reasoning, content and calls together, and calls that had to be."""

from __future__ import annotations

import pytest

from cluster.serve.assistant import AnswerReader
from cluster.serve.errors import ToolCallError
from cluster.serve.parsers import ReasoningParser
from cluster.serve.parsers.hermes import HermesParser

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def read(reader, *texts, reason="stop"):
    """All deltas, calls without their ids, and the finish reason."""
    parts = []
    for number, text in enumerate(texts):
        parts += reader.read(text, reason if number == len(texts) - 1 else None)
    for part in parts:
        for call in part.get("tool_calls", ()):
            assert call.pop("id", "call_").startswith("call_")
    return parts, reader.finish_reason(reason)


def call(index, arguments, name="add"):
    return {"tool_calls": [{"index": index, "type": "function", "function": {"name": name, "arguments": arguments}}]}


def test_plain_text_is_content():
    assert read(AnswerReader(None, None), "Hello", "", " there") == (
        [{"content": "Hello"}, {"content": " there"}],
        "stop",
    )


def test_reasoning_content_and_a_call():
    reader = AnswerReader(ReasoningParser(opened=False), HermesParser(["add"]))
    text = f"<think>\nhm\n</think>\nLet me add.\n{CALL}"
    assert read(reader, text) == (
        [{"reasoning_content": "hm"}, {"content": "Let me add."}, call(0, '{"a": 1}')],
        "tool_calls",
    )


def test_a_call_inside_reasoning_is_none():
    reader = AnswerReader(ReasoningParser(opened=True), HermesParser(["add"]))
    assert read(reader, f"I could {CALL}</think>", "No.") == (
        [{"reasoning_content": f"I could {CALL}"}, {"content": "No."}],
        "stop",
    )


def test_length_stays_length():
    assert read(AnswerReader(None, HermesParser(["add"])), CALL, reason="length")[1] == "length"


def test_one_call_at_most():
    assert read(AnswerReader(None, HermesParser(["add"]), max_calls=1), CALL + CALL)[0] == [call(0, '{"a": 1}')]


def test_a_forced_call_has_no_content():
    reader = AnswerReader(None, HermesParser(["add"]), forced=HermesParser.prefix("add"))
    rest = {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 2}'}}]}
    assert read(reader, ' {"a": 2}}</tool_call> so there') == ([call(0, ""), rest], "tool_calls")


def test_a_required_call_that_does_not_come_is_an_error():
    reader = AnswerReader(None, HermesParser(["add"]), forced=HermesParser.prefix(None))
    assert reader.read("subtract", None) == []
    with pytest.raises(ToolCallError):
        reader.read('", "arguments": {}}', "stop")
