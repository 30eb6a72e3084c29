"""Streams and groups: order, merging for slow readers, ends, and errors."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from cluster.detokenizer import TextDelta
from cluster.errors import EngineClosedError, EngineError, OutgrownError, PoisonRequestError, RequestFailedError
from cluster.serve import streams
from cluster.serve.metrics import IngressMetrics
from cluster.serve.side_channel import StepMessage
from cluster.serve.streams import StreamGroup, StreamTable
from cluster.serve.token_stream import Delta
from scheduler.outputs import FinishReason
from scheduler.step import LogprobBlock, SampledLogprobs

NONE, STOP, LENGTH, ABORT, ERROR, POISON, INVALID = FinishReason


class Letters:
    """A detokeniser for which token n is the n-th letter, 0 has no text yet, and `stop` ends the text."""

    def __init__(self, stop=""):
        self.stop = stop

    def add(self, token_ids, finished=False):
        text = "".join(chr(96 + token) for token in token_ids if token)
        return TextDelta("" if text == self.stop else text, stopped=text == self.stop != "")


def step(*entries, errors=None):
    """For `receive`, which numbers it."""
    ids, tokens, finish = zip(*entries, strict=True)
    return StepMessage(
        b"channel",
        0,
        1,
        np.array(ids, dtype=np.int64),
        np.array(tokens, dtype=np.int32),
        np.array(finish, dtype=np.uint8),
        np.full(len(ids), 16, dtype=np.int32),
        errors or {},
    )


@pytest.fixture
async def table():
    return StreamTable(asyncio.get_running_loop(), IngressMetrics())


def open_group(table, *detokenizers, on_end=lambda stream, last: None, include_stop=False):
    group = StreamGroup(on_end)
    now = time.monotonic()
    ids = [table.open(each, group, index, now, include_stop).stream_id for index, each in enumerate(detokenizers)]
    return group, ids


async def receive(table, *messages, lost=0):
    """As the receiving thread does, after `lost` messages that never arrived."""
    first = table._heard.get(b"channel", 0) + lost
    for number, message in enumerate(messages, first):
        await asyncio.to_thread(table.on_message, replace(message, number=number))
    await asyncio.sleep(0)


async def read(group):
    return [item async for item in group]


async def test_choices_come_in_arrival_order_and_the_group_ends_with_the_last(table):
    group, (a, b) = open_group(table, Letters(), Letters())
    reader = asyncio.create_task(read(group))
    await receive(table, step((b, 2, NONE), (a, 1, NONE)), step((a, 3, LENGTH), (b, 9, STOP)))
    assert await asyncio.wait_for(reader, 5) == [
        (1, Delta("b", 1, 16)),
        (0, Delta("a", 1, 16)),
        (0, Delta("c", 1, 16, "length")),
        (1, Delta("", 1, 16, "stop")),  # the stop token counts and has no text
    ]
    assert len(table) == 0


async def test_a_slow_reader_gets_merged_deltas(table):
    group, (a,) = open_group(table, Letters())
    await receive(table, step((a, 1, NONE)), step((a, 2, NONE)), step((a, 3, LENGTH)))
    assert await read(group) == [(0, Delta("abc", 3, 16, "length"))]


async def test_tokens_without_text_are_counted_with_the_next(table):
    group, (a,) = open_group(table, Letters())
    await receive(table, step((a, 0, NONE)), step((a, 0, NONE)))
    assert not group._ready
    await receive(table, step((a, 4, LENGTH)))
    assert await read(group) == [(0, Delta("d", 3, 16, "length"))]


async def test_a_finish_without_a_token_counts_none(table):
    group, (a,) = open_group(table, Letters())
    await receive(table, step((a, -1, LENGTH)))
    assert await read(group) == [(0, Delta("", 0, 16, "length"))]


async def test_a_stop_string_ends_the_stream_before_the_engine_does(table):
    ended = []
    group, (a,) = open_group(table, Letters(stop="z"), on_end=lambda stream, last: ended.append(stream))
    await receive(table, step((a, 1, NONE)), step((a, 26, NONE)), step((a, 2, NONE)))
    assert await read(group) == [(0, Delta("a", 2, 16, "stop"))]
    assert [stream.engine_ended for stream in ended] == [False]


@pytest.mark.parametrize(
    ("finish", "kind"),
    [
        (ERROR, RequestFailedError),
        (ABORT, EngineClosedError),
        (POISON, PoisonRequestError),
        (INVALID, OutgrownError),
    ],
)
async def test_an_engine_error_is_raised_to_the_reader(table, finish, kind):
    group, (a, _) = open_group(table, Letters(), Letters())
    await receive(table, step((a, 1, NONE)))
    assert await anext(group) == (0, Delta("a", 1, 16))
    await receive(table, step((a, -1, finish), errors={a: "no room"}))
    with pytest.raises(kind, match="aborted" if finish == ABORT else "no room"):
        await anext(group)


async def test_a_detokeniser_that_fails_hurts_its_own_stream_only(table):
    class Broken:
        def add(self, token_ids, finished=False):
            raise RuntimeError("boom")

    bad, (a,) = open_group(table, Broken())
    good, (b,) = open_group(table, Letters())
    await receive(table, step((a, 1, NONE), (b, 2, LENGTH)))
    assert await read(good) == [(0, Delta("b", 1, 16, "length"))]
    with pytest.raises(EngineError):
        await read(bad)


async def test_forgotten_streams_are_ignored(table):
    group, (a,) = open_group(table, Letters())
    table.forget(group.streams[0])
    await receive(table, step((a, 1, NONE)))
    assert group.streams[0].pending is None


async def test_log_probabilities_come_with_the_text(table):
    group, (a,) = open_group(table, Letters())
    words = np.arange(16, dtype=np.int32).reshape(2, 8)  # three alternatives each
    first, second = step((a, 0, NONE)), step((a, 4, NONE))
    first = replace(first, logprobs=SampledLogprobs(np.array([0]), LogprobBlock(words[:1])))
    second = replace(second, logprobs=SampledLogprobs(np.array([0]), LogprobBlock(words[1:])))
    prompt = LogprobBlock(words[:, :2])
    await receive(table, replace(first, prompt_logprobs={a: prompt}), second, step((a, 5, LENGTH)))
    [(_, delta)] = await read(group)
    assert delta.text == "de"
    assert delta.prompt_logprobs is prompt
    assert [(scored.token, scored.block.words.tolist()) for scored in delta.logprobs] == [(0, [[0, 1]]), (4, [[8, 9]])]


async def test_the_stop_token_is_text_for_those_who_asked(table):
    group, (a,) = open_group(table, Letters(), include_stop=True)
    await receive(table, step((a, 1, NONE), (a, 2, STOP)))
    assert await read(group) == [(0, Delta("ab", 2, 16, "stop"))]


async def test_a_group_that_is_failed_wakes_its_reader(table):
    group, _ = open_group(table, Letters())
    reader = asyncio.create_task(read(group))
    await asyncio.sleep(0)
    group.fail(EngineError("too late"))
    with pytest.raises(EngineError, match="too late"):
        await asyncio.wait_for(reader, 5)


async def test_after_a_gap_a_stream_takes_nothing_until_it_is_renewed():
    gaps = []
    table = StreamTable(asyncio.get_running_loop(), IngressMetrics(), gaps.extend)
    group, (a, b) = open_group(table, Letters(), Letters())
    first, second = group.streams
    await receive(table, step((a, 1, NONE)))
    await receive(table, step((a, 3, NONE), (b, 7, NONE)), lost=1)
    assert gaps == [first, second]  # of the second nothing is known: its first token may be what was lost
    assert (first.tokens, second.tokens) == ([1], [])
    assert table.renew(first) and table.renew(second)
    assert first.stream_id not in (a, b) and first.channel is None
    await receive(table, step((a, 4, NONE), (first.stream_id, 2, LENGTH), (second.stream_id, 6, LENGTH)))
    assert await read(group) == [(0, Delta("ab", 2, 16, "length")), (1, Delta("f", 1, 16, "length"))]
    assert (first.tokens, second.tokens) == ([1, 2], [6])


async def test_the_rest_of_a_message_that_cannot_be_taken_is_a_gap():
    gaps = []
    table = StreamTable(asyncio.get_running_loop(), IngressMetrics(), gaps.extend)
    group, (a, b) = open_group(table, Letters(), Letters())
    first, second = group.streams
    second.arrived = None  # what makes its first token an error
    await receive(table, step((a, 1, NONE), (b, 7, NONE)))
    assert gaps == [first, second]
    assert (first.tokens, second.tokens) == ([1], [])
    second.arrived = first.arrived
    assert table.renew(first) and table.renew(second)
    await receive(table, step((first.stream_id, 2, LENGTH), (second.stream_id, 6, LENGTH)))
    assert await read(group) == [(0, Delta("ab", 2, 16, "length")), (1, Delta("f", 1, 16, "length"))]


class Leaving(dict):
    """Streams of which one is forgotten by the event loop while the receiving thread looks whether it is there."""

    def __contains__(self, stream_id):
        return super().__contains__(stream_id) and self.pop(stream_id) is not None


async def test_a_reader_may_leave_while_its_message_is_taken():
    gaps = []
    table = StreamTable(asyncio.get_running_loop(), IngressMetrics(), gaps.extend)
    group, (a, b) = open_group(table, Letters(), Letters())
    table._streams = Leaving(table._streams)
    scores = {b: LogprobBlock(np.zeros((1, 2), dtype=np.int32))}
    await receive(table, replace(step((a, 1, LENGTH), (b, 2, LENGTH)), prompt_logprobs=scores))
    assert not gaps
    assert (0, Delta("a", 1, 16, "length")) in await read(group)


async def test_a_stream_whose_last_token_is_here_is_not_renewed(table):
    group, (a,) = open_group(table, Letters())
    await receive(table, step((a, 1, LENGTH)))
    assert not table.renew(group.streams[0])
    assert await read(group) == [(0, Delta("a", 1, 16, "length"))]


async def test_latencies_are_measured_where_tokens_arrive():
    metrics = IngressMetrics()
    table = StreamTable(asyncio.get_running_loop(), metrics)
    _, (a, b) = open_group(table, Letters(), Letters())
    await receive(table, step((a, 1, NONE), (b, 1, NONE)), step((a, 2, NONE), (b, -1, LENGTH)), step((a, 3, LENGTH)))
    assert sum(metrics.first_token.snapshot()["counts"]) == 2
    assert sum(metrics.between_tokens.snapshot()["counts"]) == 2


async def test_connections_are_forgotten_once_there_were_many_after_them(table, monkeypatch):
    monkeypatch.setattr(streams, "MAX_CHANNELS", 3)
    _, (stream_id,) = open_group(table, Letters())
    message = step((stream_id, 1, NONE))
    for number in range(9):
        table.on_message(replace(message, channel=b"kept", number=number))
        table.on_message(replace(message, channel=b"engine %d" % number, number=0))
    assert list(table._heard.items()) == [(b"engine 7", 1), (b"kept", 9), (b"engine 8", 1)]
