"""OpenAI requests: what is read, what is refused, and how the refusal names the field."""

from __future__ import annotations

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from cluster.errors import (
    EngineDeadError,
    InvalidRequestError,
    OutgrownError,
    OverloadedError,
    PoisonRequestError,
    RequestFailedError,
    UnknownModelError,
)
from cluster.serve.answers import Usage
from cluster.serve.errors import ContextLengthError, RequestTimeoutError, from_wire, problem_of, to_wire
from cluster.serve.protocol import ChatCompletionRequest, CompletionRequest
from cluster.serve.service import ChunkWriter, UsageCounter
from cluster.serve.token_stream import Delta

HELLO = [{"role": "user", "content": "hello"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
JSON = {"type": "json_object"}


def deep(levels):
    return {} if levels == 0 else {"a": deep(levels - 1)}


def call(arguments):
    return {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}


def chat(**fields):
    return ChatCompletionRequest.model_validate({"messages": HELLO} | fields)


def text(**fields):
    return CompletionRequest.model_validate({"prompt": "hello"} | fields)


def problem(make, /, **fields):
    """The answer to a body that does not validate, as FastAPI would report it."""
    with pytest.raises(ValidationError) as caught:
        make(**fields)
    findings = [finding | {"loc": ("body", *finding["loc"])} for finding in caught.value.errors()]
    return problem_of(RequestValidationError(findings, body={"messages": HELLO, "prompt": "hello"} | fields))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "ten"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"n": 0}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 257}, "stop"),  # a million of either kept every step from ending
        ({"stop_token_ids": list(range(257))}, "stop_token_ids"),
        ({"seed": 1 << 64}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "half \ud83d"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]}, "messages.0.content"),
        ({"chat_template_kwargs": {"x": "\ud83d"}}, "chat_template_kwargs"),
        ({"model": "\ud83d"}, "model"),
        ({"max_tokns": 3}, "max_tokns"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include": True}}, "stream_options.include"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [call("[1]")]}]}, "messages.0.tool_calls.0.function.argum"),
        ({"messages": [{"role": "assistant", "tool_calls": [call("{")]}]}, "messages.0.tool_calls.0.function.argum"),
        ({"messages": [{"role": "assistant"}]}, "messages.0.content"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"timeout": 0}, "timeout"),
        ({"priority": 1 << 31}, "priority"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": JSON, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"response_format": JSON, "tools": [ADD]}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "tools": [ADD]}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "\ud83d"}}, "structured_outputs"),
        ({"structured_outputs": {"field": "tools", "regex": "a"}}, "structured_outputs.field"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": deep(65)}}]}, "tools.0.function.par"),
        ({"presence_penalty": False}, "presence_penalty"),
        ({"logit_bias": {"5": "much"}}, "logit_bias"),
    ],
)
def test_a_wrong_chat_request_names_its_field(fields, param):
    answer = problem(chat, **fields)
    assert answer.status == 400
    assert answer.type == "invalid_request_error"
    assert answer.param.startswith(param)
    assert param.split(".")[0] in answer.message


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], 5, "\ud83d", [1.5], [None], {"a": 1}])
def test_a_wrong_prompt_is_refused(prompt):
    answer = problem(text, prompt=prompt)
    assert answer.status == 400
    assert answer.param.startswith("prompt")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_the_four_forms_of_a_prompt(prompt, prompts):
    assert text(prompt=prompt).prompts == prompts


def test_prompts_times_n_is_bounded():
    assert problem(text, prompt=["a"] * 600, n=2).param == "n"
    assert len(text(prompt=["a"] * 1024).prompts) == 1024


def test_neutral_values_of_unsupported_fields_are_accepted():
    chat(
        logprobs=False,
        top_logprobs=None,
        presence_penalty=0.0,
        frequency_penalty=0,
        logit_bias=None,
        response_format={"type": "text"},
        structured_outputs=None,
        tools=[],
        tool_choice="none",
        parallel_tool_calls=True,
    )
    text(echo=False, logprobs=None, best_of=1, suffix=None)


def test_false_is_not_zero():
    assert problem(text, best_of=True).param == "best_of"
    assert problem(text, logprobs=False).param == "logprobs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
    ],
)
def test_sampling_limits_name_the_field_the_client_used(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields).sampling(seed=0, room=100)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_sampling_defaults_and_limits():
    params = chat(stop="END", seed=-1, top_k=5).sampling(seed=7, room=100)
    assert (params.max_tokens, params.seed, params.stop, params.top_k) == (100, (1 << 64) - 1, ["END"], 5)
    assert chat().sampling(seed=7, room=100).seed == 7
    assert text().sampling(0, 100, 16).max_tokens == 16
    assert text().sampling(0, 10, 16).max_tokens == 10
    assert text(max_tokens=0).sampling(0, 10, 16).max_tokens == 0
    with pytest.raises(ContextLengthError, match="room for 10 tokens"):
        text(max_tokens=11).sampling(0, 10, 16)


def test_what_is_to_be_scored():
    def scores(params):
        return params.logprobs, params.prompt_logprobs

    assert scores(chat().sampling(0, 10)) == (None, None)
    assert scores(chat(logprobs=True).sampling(0, 10)) == (0, None)
    assert scores(chat(logprobs=True, top_logprobs=3, prompt_logprobs=0).sampling(0, 10)) == (3, 0)
    assert scores(text(logprobs=0).sampling(0, 10)) == (0, None)
    assert scores(text(logprobs=2, echo=True).sampling(0, 10)) == (2, 2)
    assert scores(text(logprobs=2, echo=True, prompt_logprobs=5).sampling(0, 10)) == (2, 5)
    bias = chat(logit_bias={"5": -100, "7": 1.5}).sampling(0, 10).logit_bias
    assert bias == {5: -100, 7: 1.5}


def test_messages_become_plain_text_for_the_template():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}])
    assert [message.for_template() for message in request.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
    ]


def test_tool_messages_become_what_templates_expect():
    request = chat(
        messages=[
            {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')]},
            {"role": "tool", "content": "2", "tool_call_id": "call_1"},
        ],
        tools=[ADD],
    )
    assistant, tool = [message.for_template() for message in request.messages]
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert tool == {"role": "tool", "content": "2", "tool_call_id": "call_1"}
    assert request.offered_tools[0].for_template() == ADD
    assert chat(tools=[ADD], tool_choice="none").offered_tools == []


def test_a_body_with_many_mistakes_gets_a_short_answer():
    answer = problem(text, prompt=[1] + ["a"] * 10_000)
    assert answer.param.startswith("prompt")
    assert len(answer.message) < 5_000


def test_usage_counts_each_prompt_once():
    count = UsageCounter([[1, 2, 3], [4]], choices=2)
    for index, delta in [(0, Delta("a", 2, 2)), (1, Delta("b", 3, 3)), (2, Delta("c", 1, 0)), (0, Delta("d", 1, 2))]:
        count.add(index, delta)
    assert count.usage == Usage.count(prompt_tokens=4, completion_tokens=7, cached_tokens=2)


def test_chunks_are_json_with_the_text_as_it_is():
    import json

    count = UsageCounter([[1, 2, 3]], choices=1)
    writer = ChunkWriter("id-1", "text_completion", 'a "model"', count, with_usage=True)
    chunk = json.loads(writer.choice(2, '"text":"x"', "stop"))
    assert chunk["choices"] == [{"index": 2, "text": "x", "logprobs": None, "finish_reason": "stop"}]
    assert chunk["model"] == 'a "model"'
    assert chunk["usage"] is None
    count.add(0, Delta("x", 4, 2))
    last = json.loads(writer.usage())
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    writer = ChunkWriter("id-1", "text_completion", "m", count, with_usage=True, continuous_usage=True)
    assert json.loads(writer.choice(0, '"text":"x"', None))["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequestError("no", "top_p"), 400, None),
        (ContextLengthError("long", "prompt"), 400, "context_length_exceeded"),
        (UnknownModelError("no model", "model"), 404, "model_not_found"),
        (OverloadedError("full", 3), 429, "rate_limit_exceeded"),
        (EngineDeadError("rank 1 died"), 503, "engine_dead"),
        (OutgrownError("request 7 outgrew the KV cache"), 400, "request_outgrown"),
        (RequestFailedError("NaN"), 500, "request_failed"),
        (PoisonRequestError("the workers fail"), 500, "poison_request"),
        (RequestTimeoutError("late"), 408, "request_timeout"),
        (HTTPException(405, "Method Not Allowed"), 405, None),
        (RuntimeError("secret path /a/b"), 500, None),
    ],
)
def test_errors_have_openai_form(error, status, code):
    answer = problem_of(error)
    assert (answer.status, answer.code) == (status, code)
    assert set(answer.body["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in answer.message
    assert (answer.headers.get("Retry-After") == "3") == (status == 429)
    assert (answer.headers.get("X-Should-Retry") == "false") == isinstance(
        error, RequestFailedError | PoisonRequestError | RequestTimeoutError
    )


@pytest.mark.parametrize("error", [UnknownModelError("m", "model"), OverloadedError("o", 9), EngineDeadError("d")])
def test_errors_survive_the_way_from_the_engine(error):
    back = from_wire(to_wire(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_malformed_json_says_where():
    error = RequestValidationError(
        [{"type": "json_invalid", "loc": ("body", 7), "msg": "JSON decode error", "ctx": {"error": "Expecting value"}}]
    )
    answer = problem_of(error)
    assert answer.status == 400
    assert answer.message == "the body is not valid JSON: Expecting value at character 7"
