"""Tool calls and reasoning, through the official client; examples in the conversation make the model write them."""

from __future__ import annotations

import json

import pytest

from tests.integration.openai_api.settings import CAPITAL, GREEDY

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


def called(*cities):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": "get_weather", "arguments": json.dumps({"city": city})},
            }
            for number, city in enumerate(cities)
        ],
    }


def ask(city):
    return {"role": "user", "content": f"What is the weather in {city}?"}


EXAMPLES = [ask("Rome"), called("Rome"), ask("London"), called("London")]
PARIS = [*EXAMPLES, ask("Paris")]
TWO = [
    ask("Rome and London"), called("Rome", "London"), ask("Berlin and Oslo"), called("Berlin", "Oslo"),
    ask("Paris and Tokyo"),
]  # fmt: skip
TOOLED = GREEDY | {"tools": [WEATHER, TIME], "max_tokens": 80}


def streamed_calls(stream):
    """(content, [(name, arguments)], finish reason) of a stream; checks the form of its deltas."""
    content, calls, finish = "", [], None
    for chunk in stream:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for part in choice.delta.tool_calls or []:
            if part.id is not None:
                assert part.index == len(calls)
                assert part.type == "function"
                calls.append([part.function.name, ""])
            else:
                assert part.function.name is None
            calls[part.index][1] += part.function.arguments
    return content, [tuple(call) for call in calls], finish


@pytest.mark.parametrize(("messages", "cities"), [(PARIS, ["Paris"]), (TWO, ["Paris", "Tokyo"])])
def test_the_model_calls_tools(client, messages, cities):
    [choice] = client.chat.completions.create(messages=messages, **TOOLED).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("get_weather", {"city": city}) for city in cities]
    assert len({call.id for call in choice.message.tool_calls}) == len(cities)

    content, parts, finish = streamed_calls(client.chat.completions.create(messages=messages, stream=True, **TOOLED))
    assert (content, finish) == ("", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in parts] == calls


def test_a_named_function_is_called_whatever_is_asked(client):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    for messages in (CAPITAL, PARIS):
        answer = client.chat.completions.create(messages=messages, tool_choice=choice, **TOOLED | {"max_tokens": 20})
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        assert call.function.arguments.startswith("{")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    stream = client.chat.completions.create(messages=PARIS, tool_choice=choice, stream=True, **TOOLED)
    assert streamed_calls(stream)[:2] == ("", [("get_weather", '{"city": "Paris"}')])


def test_parallel_calls_can_be_switched_off(client):
    answer = client.chat.completions.create(messages=TWO, parallel_tool_calls=False, **TOOLED)
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_required_means_a_call(client):
    answer = client.chat.completions.create(messages=PARIS, tool_choice="required", **TOOLED)
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    only_time = TOOLED | {"tools": [TIME], "max_tokens": 4}
    answer = client.chat.completions.create(messages=CAPITAL, tool_choice="required", **only_time)
    assert answer.choices[0].message.tool_calls[0].function.name == "get_time"


def test_without_tools_the_same_text_is_content(client, server):
    none = client.chat.completions.create(messages=PARIS, tool_choice="none", **TOOLED | {"max_tokens": 8})
    assert none.choices[0].message.content.startswith("<tool_call>")
    assert none.choices[0].message.tool_calls is None
    bare = client.chat.completions.create(messages=PARIS, **GREEDY | {"max_tokens": 1})
    assert bare.usage.prompt_tokens == none.usage.prompt_tokens  # the tools were not in the prompt
    with_tools = client.chat.completions.create(messages=PARIS, **TOOLED | {"max_tokens": 1})
    assert with_tools.usage.prompt_tokens > bare.usage.prompt_tokens
    server.wait_idle()


def test_reasoning_is_apart_from_the_answer(client):
    def thought(country, city):
        text = f"<think>\nThe user asks for {country}.\n</think>\n\nIt is {city}."
        return [{"role": "user", "content": f"Capital of {country}?"}, {"role": "assistant", "content": text}]

    messages = [*thought("Italy", "Rome"), *thought("Spain", "Madrid"), *thought("Austria", "Vienna")]
    messages.append({"role": "user", "content": "Capital of France?"})
    settings = GREEDY | {"max_tokens": 60}
    message = client.chat.completions.create(messages=messages, **settings).choices[0].message
    assert message.reasoning_content == "The user asks for France."
    assert message.content == "It is Paris."
    deltas = [
        chunk.choices[0].delta for chunk in client.chat.completions.create(messages=messages, stream=True, **settings)
    ]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content
    opened = {"chat_template_kwargs": {"thinking": True}}  # the template writes <think>
    message = client.chat.completions.create(messages=messages, extra_body=opened, **settings).choices[0].message
    assert (message.reasoning_content, message.content) == ("The user asks for France.", "It is Paris.")
