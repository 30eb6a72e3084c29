"""DESIGN's rules about how a request ends (R5-R7, R13): one test each, which fails when the rule is broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from scheduler.fake_model import FakeModel
from scheduler.outputs import FinishReason
from scheduler.request import InvalidRequest
from scheduler.sampling_params import SamplingParams
from tests.unit.rule_helpers import EOS, plans_of, stops_after
from tests.unit.scheduler_harness import Harness, make_config, make_request, run_alone


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [3, 64])
def test_r5_max_tokens_is_exact_and_bad_lengths_are_refused(depth: int, budget: int) -> None:
    for max_tokens in (0, 1, 2, 3, 7):
        harness = Harness(make_config(overlap_depth=depth, max_step_tokens=budget))
        (tokens,) = harness.run(make_request(1, range(10, 16), max_tokens=max_tokens))
        assert len(tokens) == max_tokens
        assert harness.streams[1].finish == FinishReason.LENGTH
        plans = plans_of(harness)
        assert sum(plan.num_samples for plan in plans) == max_tokens
        assert sum(plan.num_tokens for plan in plans) == 6 + max(max_tokens - 1, 0), "a finish by length wastes no step"
    config = make_config(max_seq_len=16, num_pages=4, page_size=4)
    harness = Harness(config)
    (tokens,) = harness.run(make_request(2, range(10, 25), max_tokens=1))
    assert len(tokens) == 1
    with pytest.raises(ValidationError):
        SamplingParams(max_tokens=-1)
    refused = {
        "is empty": make_request(3, []),
        "prompt has 16 tokens": make_request(4, range(16), max_tokens=0),
        "prompt has 200 tokens": make_request(5, range(200)),
        "prompt of 8 tokens and max_tokens 9": make_request(6, range(8), max_tokens=9),
    }
    for why, bad in refused.items():
        with pytest.raises(InvalidRequest, match=why):
            harness.scheduler.validate(bad)
        with pytest.raises(InvalidRequest, match=why):
            harness.scheduler.add(bad)
    assert not harness.scheduler.has_work


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_r6_tokens_after_eos_are_dropped_not_sent_not_inserted(depth: int) -> None:
    prompt = list(range(10, 15))
    model, expected = stops_after(prompt, 6)
    harness = Harness(make_config(page_size=1, eos_token_ids=(EOS,), overlap_depth=depth), model)
    assert harness.run(make_request(1, prompt, max_tokens=30)) == [expected]  # the harness refuses later tokens
    assert harness.streams[1].finish == FinishReason.STOP
    assert sum(plan.num_samples for plan in plans_of(harness)) == len(expected) + depth - 1
    wasted, _ = run_alone(make_request(0, [*prompt, *expected], max_tokens=3), model, harness.config)
    assert harness.scheduler.stats().cached_pages <= len(prompt) + len(expected)
    harness.run(make_request(2, [*prompt, *expected, *wasted], max_tokens=1))
    assert harness.streams[2].cached_tokens <= len(prompt) + len(expected)


def abort_queued(harness: Harness) -> None:
    harness.add(make_request(9, range(50, 60)))


def abort_mid_chunk(harness: Harness) -> None:
    harness.add(make_request(9, range(50, 80)))
    harness.plan()
    harness.deliver()


def abort_planned(harness: Harness) -> None:
    harness.add(make_request(9, range(50, 56), max_tokens=20))
    for _ in range(3):
        harness.step()
    while harness.plan() is not None:
        pass


def abort_finishing(harness: Harness) -> None:
    """The step with its last token is planned and has not returned."""
    harness.add(make_request(9, range(50, 56), max_tokens=1))
    while harness.plan() is not None:
        pass


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("moment", [abort_queued, abort_mid_chunk, abort_planned, abort_finishing])
@pytest.mark.parametrize("company", [False, True])
def test_r7_abort_gives_rows_and_pages_back_once_and_not_too_early(
    depth: int, moment: Callable[[Harness], None], company: bool
) -> None:
    harness = Harness(
        make_config(page_size=4, num_pages=24, max_running_requests=2, max_step_tokens=8, overlap_depth=depth)
    )
    if company:
        harness.add(make_request(1, range(100, 110), max_tokens=25))
        harness.step()
    moment(harness)
    assert harness.abort(9)
    in_flight = {page for _, _, pages in harness.in_flight for page in pages}
    assert not harness.free_pages() & in_flight
    harness.abort(9)
    harness.add(make_request(10, range(70, 82), max_tokens=10))  # wants the row and the pages
    harness.finish()
    assert not harness.abort(9)
    assert harness.streams[9].finish == FinishReason.ABORT
    assert harness.streams[9].tokens == [] or moment is abort_planned
    assert len(harness.scheduler.cache.free_slots) == len(harness.free_pages())


def test_r13_every_eos_stops_and_ignore_eos_and_min_tokens_hold() -> None:
    eos = (3, 5)
    config = make_config(eos_token_ids=eos, max_seq_len=64)
    model = FakeModel(vocab_size=12, eos_token_id=5, eos_probability=0.1)
    requests, met = [], set()
    for i in range(60):
        options = [{}, {"min_tokens": 6}, {"ignore_eos": True}, {"stop_token_ids": [7], "min_tokens": 3}][i % 4]
        requests.append(make_request(i, [20 + i], max_tokens=12, **options))
    harness = Harness(config, model)
    for request, tokens in zip(requests, harness.run(*requests), strict=True):
        params, finish = request.sampling, harness.streams[request.request_id].finish
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        places = [i for i, token in enumerate(tokens) if token in stops]
        assert places == ([len(tokens) - 1] if finish == FinishReason.STOP else [])
        assert all(place >= params.min_tokens for place in places)
        if params.ignore_eos:
            assert len(tokens) == 12
        met.update(tokens[place] for place in places)
    assert met == {3, 5, 7}, "every kind of stop should have been met"
