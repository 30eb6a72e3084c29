"""Answers with many log probabilities: the same JSON as others, made in a thread, in steps that are short."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from starlette.responses import Response

from cluster.config import EngineConfig
from cluster.serve import large_answers
from cluster.serve.answers import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    FunctionCall,
    MessageToolCall,
    Tokenized,
    Usage,
)
from cluster.serve.large_answers import LARGE, PIECE, finished, json_text
from cluster.serve.service import Service, UsageCounter, event_texts
from cluster.serve.streams import StreamGroup
from cluster.serve.token_stream import Delta, ScoredToken, TokenStream
from scheduler.step import LogprobBlock

USAGE = Usage.count(3, 2, 0)
ENTRIES = [None] + [{"5": {"logprob": -1.5, "rank": 1, "decoded_token": "é\n"}}] * (2 * PIECE + 3)
SCORES = {"tokens": ["a"] * 100, "token_logprobs": [None] + [-0.25] * 99, "top_logprobs": [{"a": 1.0}] * 100}


def chat(**fields):
    message = AssistantMessage(
        content="ü", tool_calls=[MessageToolCall(id="c", function=FunctionCall(name="f", arguments="{}"))]
    )
    choices = [ChatChoice(index=0, message=message, logprobs={"content": [{"a": [1]}] * 70}, finish_reason="stop")]
    return ChatCompletion(id="i", model="m", choices=choices, usage=USAGE, **fields)


def completion(**fields):
    choices = [CompletionChoice(index=i, text="t", finish_reason="length", **fields) for i in range(70)]
    return Completion(id="i", model="m", choices=choices, usage=USAGE)


@pytest.mark.parametrize(
    "answer",
    [
        chat(),
        chat(prompt_logprobs=ENTRIES),
        completion(),
        completion(logprobs=SCORES, prompt_logprobs=ENTRIES),
        Tokenized(count=70, max_model_len=8, tokens=list(range(70))),
        Tokenized(count=0, max_model_len=8, tokens=[], token_strs=[]),
    ],
)
def test_the_json_is_that_of_other_answers(answer, monkeypatch):
    longest, encode = [], large_answers.to_json

    def noted(value):
        longest.append(len(value) if isinstance(value, list | dict) else 0)
        return encode(value)

    monkeypatch.setattr(large_answers, "to_json", noted)
    found, expected = json_text(answer), answer.model_dump_json()
    assert json.loads(found) == json.loads(expected)
    assert list(json.loads(found)) == list(json.loads(expected))
    assert max(longest) <= PIECE


async def test_a_large_answer_is_made_in_a_thread_and_comes_encoded():
    threads = []

    def make():
        threads.append(threading.current_thread())
        return chat()

    assert isinstance(await finished(make, LARGE - 1), ChatCompletion)
    response = await finished(make, LARGE)
    assert json.loads(response.body)["choices"] == json.loads(chat().model_dump_json())["choices"]
    assert response.headers["content-type"] == "application/json"
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


def scores(tokens, top=20):
    return LogprobBlock(np.zeros((tokens, 2 + 2 * top), dtype=np.int32))


def group_of(*deltas):
    group = StreamGroup(lambda stream, last: None)
    for index, delta in enumerate(deltas):
        group.add(TokenStream(index, None, group, index, 0.0))
        group.deliver(group.streams[index], delta)
    return group


@pytest.mark.parametrize(
    ("delta", "large"),
    [
        (Delta("a", 1, finish_reason="stop", prompt_logprobs=scores(10)), False),
        (Delta("a", 1, finish_reason="stop", prompt_logprobs=scores(100)), True),
        (Delta("a", 1, finish_reason="stop", logprobs=[ScoredToken(1, scores(1))] * 10), False),
        (Delta("a", 1, finish_reason="stop", logprobs=[ScoredToken(1, scores(1))] * 100), True),
    ],
)
async def test_log_probabilities_of_many_tokens_are_written_in_a_thread(delta, large):
    closed = []
    engine = SimpleNamespace(close_group=closed.append)
    service = Service("m", 64, engine, None, EngineConfig(), None)
    group = group_of(delta, Delta("b", 1, finish_reason="stop"))
    answer = await service.answer(group, UsageCounter([[1]], 2), lambda choices: chat())
    assert isinstance(answer, Response) == large
    assert closed == [group]

    threads = []

    def write(index, delta):
        threads.append(threading.current_thread() is threading.main_thread())
        return f"{index}{delta.text} "

    group = group_of(delta, Delta("b", 1, finish_reason="stop"))
    texts = [text async for text in event_texts("begin ", await anext(group), group, write, lambda: "end")]
    assert texts == ["begin 0a 1b end"]
    assert threads == [not large, True]


async def test_the_loop_goes_on_while_a_large_answer_is_made():
    go_on = threading.Event()
    answer = asyncio.ensure_future(finished(lambda: go_on.wait(60) and chat(), LARGE))
    await asyncio.sleep(0)
    go_on.set()
    assert isinstance(await answer, Response)
