"""Bodies of many mistakes, or of more than is read: one finding is enough, and nothing is read beyond the bounds."""

from __future__ import annotations

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from cluster.serve.body import MAX_VALUES
from cluster.serve.errors import problem_of
from cluster.serve.messages import MAX_ARGUMENTS, MAX_MESSAGES
from cluster.serve.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

MANY = 20_000
KEYS = {f"k{i}": 1 for i in range(MANY)}
USER = {"role": "user", "content": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def findings(model, body):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return caught.value.errors()


def problem(model, body):
    found = [each | {"loc": ("body", *each["loc"])} for each in findings(model, body)]
    return problem_of(RequestValidationError(found, body=body))


def prompt(value, **fields):
    return CompletionRequest, {"prompt": value} | fields


def chat(message, **fields):
    return ChatCompletionRequest, {"messages": message if isinstance(message, list) else [message]} | fields


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (prompt([1] + ["a"] * MANY), "prompt.1"),
        (prompt([[1]] + [1] * 1000), "prompt.1"),
        (prompt([["a"] * MANY]), "prompt.0.0"),
        (prompt(["a"] + [1] * 1000), "prompt.1"),
        (prompt(["a"] * MANY), "prompt"),
        (prompt([[1]] * MANY), "prompt"),
        (prompt("x", stop_token_ids=["a"] * MANY), "stop_token_ids"),
        (prompt("x", stop=[1] * MANY), "stop"),
        (prompt("x", logit_bias={str(i): "a" for i in range(MANY)}), "logit_bias"),
        (prompt("x", stream_options=KEYS), "stream_options"),
        (prompt("x", response_format={"type": "text"} | KEYS), "response_format"),
        (prompt("x", structured_outputs=KEYS), "structured_outputs"),
        (prompt("x", **KEYS), None),
        (chat([{}] * 4000), "messages.0.role"),
        (chat([1] * MANY), "messages"),
        (chat(USER | KEYS), "messages.0"),
        (chat({"role": "user", "content": [1] * MANY}), "messages.0.content"),
        (chat({"role": "assistant", "tool_calls": [1] * MANY}), "messages.0.tool_calls.0"),
        (chat(USER, tools=[1] * 128), "tools.0"),
        (chat(USER, tools=[1] * MANY), "tools"),
        (chat(USER, tool_choice=KEYS), "tool_choice"),
        ((TokenizeRequest, {"messages": [1] * 4000}), "messages.0"),
        ((DetokenizeRequest, {"tokens": ["a"] * MANY}), "tokens.0"),
    ],
)
def test_many_mistakes_are_few_findings(request_, param):
    model, body = request_
    assert len(findings(model, body)) <= 4  # one for each form that a field may have
    answer = problem(model, body)
    assert answer.status == 400
    assert (answer.param or "").startswith(param or "")
    assert answer.param is not None or param is None
    assert len(answer.message) < 1000


def test_separate_mistakes_are_all_named():
    answer = problem(*chat(USER, max_tokns=1, temperature="hot", n=0, user="u" * 257))
    assert all(name in answer.message for name in ("max_tokns", "temperature", "n:", "user"))
    assert "256" in answer.message


@pytest.mark.parametrize(
    ("request_", "limit"),
    [
        (chat([USER] * (MAX_MESSAGES + 1)), MAX_MESSAGES),
        (chat({"role": "user", "content": [{"type": "text", "text": "x"}] * (MAX_VALUES // 2)}), MAX_VALUES),
        (chat(USER, chat_template_kwargs={"a": [[0] * 256] * 256}), MAX_VALUES),
        (chat({"role": "assistant", "tool_calls": [CALL] * (MAX_VALUES // 3)}), MAX_VALUES),
        (prompt("x", **KEYS), 256),
        (prompt("x", stop_token_ids=list(range(257))), 256),
        (prompt("x", user="u" * 257), 256),
    ],
)
def test_what_is_refused_for_its_size_says_the_limit(request_, limit):
    assert str(limit) in problem(*request_).message


def test_a_call_s_arguments_have_the_same_bound():
    arguments = '{"a": [' + ",".join(["0"] * MAX_VALUES) + "]}"
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    answer = problem(*chat({"role": "assistant", "tool_calls": [call]}))
    assert str(MAX_VALUES) in answer.message
    assert answer.param == "messages.0.tool_calls.0.function.arguments"


def test_the_arguments_of_all_calls_together_are_bounded_before_any_is_read():
    call = CALL | {"function": {"name": "f", "arguments": "not JSON" + "," * (MAX_ARGUMENTS // 8)}}
    answer = problem(*chat([{"role": "assistant", "tool_calls": [call] * 3}] * 3))
    assert str(MAX_ARGUMENTS) in answer.message
    assert answer.param == "messages"


def test_long_conversations_and_prompts_are_read():
    assert len(ChatCompletionRequest.model_validate({"messages": [USER] * MAX_MESSAGES}).messages) == MAX_MESSAGES
    assert len(CompletionRequest.model_validate({"prompt": [1] * 200_000}).prompts[0]) == 200_000
    assert CompletionRequest.model_validate({"prompt": "x", "user": "u" * 256}).user == "u" * 256


def test_an_assistant_message_as_openai_s_client_dumps_it_is_taken():
    dumped = {"content": "y", "refusal": None, "role": "assistant", "annotations": None, "audio": None}
    dumped |= {"function_call": None, "tool_calls": None}
    for message in (dumped, dumped | {"annotations": []}):
        request = ChatCompletionRequest.model_validate({"messages": [USER, message, USER]})
        assert request.messages[1].for_template() == {"role": "assistant", "content": "y"}
    answer = problem(*chat(dumped | {"audio": {"id": "a"}}))
    assert answer.param == "messages.0.audio"
