"""Outputs of a given form on a real, small model: they parse and validate whatever it would rather say."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest

from tests.integration.openai_api.settings import CAPITAL, GREEDY, MODEL
from tests.integration.openai_api.test_tools import PARIS, TIME, WEATHER, streamed_calls

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "married"],
    "additionalProperties": False,
}
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "minItems": 2, "maxItems": 5}
TREE = {
    "$defs": {
        "leaf": {"enum": ["oak", "élm", None, 3]},
        "pair": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
            "required": ["left", "right"],
            "additionalProperties": False,
        },
    },
    "anyOf": [{"$ref": "#/$defs/pair"}, {"type": "array", "items": {"$ref": "#/$defs/pair"}, "maxItems": 2}],
}
DATED = {
    "type": "object",
    "properties": {
        "day": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
    },
    "required": ["day", "code"],
    "additionalProperties": False,
}
ARITHMETIC = 'root ::= number (" + " number)+ " ="\nnumber ::= [0-9] [0-9]?\n'
NO_SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}
ADD = {"prompt": "2 + 3 = 5\n4 + 1 = 5\n", "max_tokens": 16, "temperature": 0, "model": MODEL}


def as_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def ask_for(client, schema, **fields):
    question = [{"role": "user", "content": "Tell me about somebody, as JSON."}]
    settings = {"model": MODEL, "messages": question, "max_tokens": 300, "response_format": as_schema(schema)}
    return client.chat.completions.create(**settings | fields)


def write(client, schema, **fields):
    """The same without a chat, where the model may not reason first."""
    settings = {"model": MODEL, "prompt": "Somebody, as JSON:\n", "max_tokens": 300}
    return client.completions.create(**settings | fields, extra_body={"response_format": as_schema(schema)})


def check(schema, choice):
    assert choice.finish_reason == "stop", choice
    jsonschema.validate(json.loads(choice.text), schema)


def test_answers_parse_and_keep_their_schema(client):
    """Also where a high temperature makes every other text likely."""
    with ThreadPoolExecutor(8) as threads:
        jobs = [
            (schema, threads.submit(write, client, schema, temperature=temperature, seed=3))
            for schema in (PERSON, NUMBERS, TREE, DATED)
            for temperature in (0, 1.3)
        ]
    for schema, job in jobs:
        check(schema, job.result().choices[0])


@pytest.mark.full_grid
@pytest.mark.timeout(1800)
def test_two_hundred_answers_keep_their_schema(client):
    with ThreadPoolExecutor(8) as threads:
        jobs = [
            (schema, threads.submit(write, client, schema, temperature=0.2 * (seed % 10), seed=seed, n=2))
            for seed in range(25)
            for schema in (PERSON, NUMBERS, TREE, DATED)
        ]
        for schema, job in jobs:
            for choice in job.result().choices:
                check(schema, choice)


def test_any_json_object(client):
    settings = {"temperature": 0, "max_tokens": 100, "extra_body": {"response_format": {"type": "json_object"}}}
    prompt = 'One person: {"name": "Ann", "age": 3}\nOne city: {"name": "Rome"}\nOne river:'
    answer = client.completions.create(model=MODEL, prompt=prompt, **settings)
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].text), dict)


def test_a_stream_is_the_same_text_and_ends_by_itself(client):
    whole = ask_for(client, PERSON, temperature=0).choices[0]
    chunks = list(ask_for(client, PERSON, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.message.content), PERSON)
    cut = ask_for(client, PERSON, temperature=0, max_tokens=6).choices[0]
    assert cut.finish_reason == "length"
    assert whole.message.content.startswith(cut.message.content)


def test_regex_choice_and_grammar(client):
    def say(stream=False, **wanted):
        answer = client.completions.create(**ADD, extra_body={"structured_outputs": wanted}, stream=stream)
        if stream:
            return "".join(chunk.choices[0].text for chunk in answer)
        return answer.choices[0].text

    for pattern in (r"[a-f]{3,8}", r"(\d{2}/){2}\d{4}", r"[α-ω]{2}😀?"):
        text = say(regex=pattern)
        assert re.fullmatch(pattern, text), text
        assert say(stream=True, regex=pattern) == text
    assert say(choice=["seven", "élan vital", "no"]) in ("seven", "élan vital", "no")
    assert say(choice=["only this 😀"]) == "only this 😀"
    sums = re.compile(r"\d\d?( \+ \d\d?)+ =|\d\d?( \+ \d\d?)*( \+)? ?")  # the second: cut by max_tokens
    for grammar in (ARITHMETIC, 'start: NUMBER (" + " NUMBER)+ " ="\nNUMBER: /[0-9][0-9]?/\n'):
        text = say(grammar=grammar)
        assert sums.fullmatch(text), text
        assert say(stream=True, grammar=grammar) == text
    assert json.loads(say(json={"const": [1, None]})) == [1, None]
    answer = client.chat.completions.create(
        messages=CAPITAL, extra_body={"structured_outputs": {"choice": ["Paris", "Rome"]}}, **GREEDY
    )
    assert answer.choices[0].message.content == "Paris"
    assert answer.usage.completion_tokens < 5


@pytest.mark.full_grid
def test_others_in_the_batch_say_what_they_say_alone(client, server):
    def tell(seed):
        fields = {"prompt": f"Story {seed}:", "max_tokens": 24, "seed": seed, "temperature": 0.9, "model": MODEL}
        return client.completions.create(extra_body={"ignore_eos": True}, **fields).choices[0].text

    alone = [tell(seed) for seed in range(3)]
    with ThreadPoolExecutor(8) as threads:
        free = [threads.submit(tell, seed) for seed in range(3)]
        bound = [threads.submit(write, client, PERSON, temperature=1.0, seed=seed) for seed in range(3)]
        assert [job.result() for job in free] == alone
        for job in bound:
            check(PERSON, job.result().choices[0])
    server.wait_idle()


def test_it_goes_with_stop_strings_and_log_probabilities(client):
    form = {"structured_outputs": {"regex": "[a-z]{40}"}}
    whole = client.completions.create(**ADD, extra_body=form, logprobs=1).choices[0]
    assert "".join(whole.logprobs.tokens) == whole.text
    stop = whole.text[5:8]
    assert client.completions.create(**ADD, extra_body=form, stop=stop).choices[0].text == whole.text.partition(stop)[0]
    banned = client.completions.create(**ADD, extra_body=form | {"min_tokens": 3, "ignore_eos": True}).choices[0]
    assert re.fullmatch("[a-z]{1,40}", banned.text)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": as_schema({"type": "strin"})}, "response_format"),
        ({"response_format": as_schema({"type": "array", "uniqueItems": True})}, "response_format"),
        ({"response_format": as_schema({"$ref": "http://example.com/schema"})}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "tools": [TIME]}, "response_format"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "\ud83d"}}, "structured_outputs"),
        ({"tools": [NO_SCHEMA], "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
def test_a_wrong_form_is_refused_by_name(http, fields, param):
    for stream in (False, True):
        body = json.dumps({"messages": CAPITAL, "max_tokens": 4, "stream": stream} | fields)
        response = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param, response.text


def test_required_calls_keep_their_tools_schema(client):
    city = {"enum": ["Oslo", "Bern"]}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}, TIME]
    named = {"type": "function", "function": {"name": "get_weather"}}
    settings = {"model": MODEL, "messages": PARIS, "tools": tools, "temperature": 1.4, "seed": 1, "max_tokens": 200}
    for choice in (named, "required"):
        answer = client.chat.completions.create(tool_choice=choice, n=3, parallel_tool_calls=False, **settings)
        for each in answer.choices:
            [call] = each.message.tool_calls
            assert each.finish_reason == "tool_calls"
            arguments = json.loads(call.function.arguments)
            schemas = {"get_weather": parameters, "get_time": TIME["function"]["parameters"]}
            jsonschema.validate(arguments, schemas[call.function.name])
    content, calls, finish = streamed_calls(
        client.chat.completions.create(tool_choice=named, stream=True, **settings | {"temperature": 0})
    )
    assert (content, finish) == ("", "tool_calls")
    [(name, arguments)] = calls
    assert name == "get_weather"
    jsonschema.validate(json.loads(arguments), parameters)


def test_reasoning_comes_before_the_form(client):
    thought = "<think>\nThe user asks for Italy.\n</think>\n\nRome"
    messages = [{"role": "user", "content": "Capital of Italy?"}, {"role": "assistant", "content": thought}]
    messages = messages * 2 + [{"role": "user", "content": "Capital of France?"}]
    body = {"structured_outputs": {"choice": ["Paris", "Rome"]}, "chat_template_kwargs": {"thinking": True}}
    message = (
        client.chat.completions.create(messages=messages, extra_body=body, **GREEDY | {"max_tokens": 60})
        .choices[0]
        .message
    )
    assert message.content in ("Paris", "Rome")
    assert message.reasoning_content


def test_tools_without_a_required_call_are_as_before(client):
    answer = client.chat.completions.create(messages=PARIS, tools=[WEATHER], **GREEDY | {"max_tokens": 60})
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            messages=PARIS, tools=[WEATHER], response_format={"type": "json_object"}, **GREEDY
        )
    assert caught.value.param == "response_format"
