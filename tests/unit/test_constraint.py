"""Constrained requests in the scheduler: masks, overlap, preemption, recovery, resumption, failures.

That outputs follow their constraint whatever happens is in `test_scheduler_stateful`.
"""

from __future__ import annotations

import pytest

from scheduler.outputs import FinishReason
from scheduler.step import PlanFlags, StepPlan
from tests.unit.scheduler_harness import Harness, make_config, make_request, run_alone
from tests.unit.toy_constraint import ToyConstraint

VOCAB = 1000


def constrained(request_id: int, prompt: object, max_tokens: int = 30, length: int = 10, **more: object):
    return make_request(request_id, prompt, max_tokens, request_constraint=ToyConstraint(VOCAB, length), **more)


def plans(harness: Harness) -> list[StepPlan]:
    return [StepPlan.decode(buffer) for buffer in harness.plans]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_only_the_constrained_give_up_overlap(depth):
    harness = Harness(make_config(overlap_depth=depth))
    free = make_request(1, [1, 2, 3], 30)
    bound = constrained(2, [4, 5, 6], length=10)
    tokens, other = harness.run(free, bound)
    assert len(tokens) == 30 and len(other) == 10
    row = plans(harness)[0].rows[1]
    steps = [row in plan.rows[: plan.num_rows] for plan in plans(harness)]
    assert steps.count(True) == 10
    assert steps[: 9 * depth + 1] == [True, *[False] * (depth - 1)] * 9 + [True]
    assert all(0 in plan.rows[: plan.num_rows] for plan in plans(harness)[:29])


def test_a_mask_travels_only_with_the_token_that_it_is_for():
    harness = Harness(make_config(max_step_tokens=8))
    harness.run(constrained(1, range(20, 40), length=4), make_request(2, [1, 2], 12))
    for plan in plans(harness):
        expected = [
            number for number, entry in enumerate(plan.sample[: plan.num_samples]) if plan.rows[entry] == 0
        ]  # fmt: skip
        if not expected:
            assert plan.extras is None and not plan.flags & PlanFlags.EXTRAS
        else:
            assert plan.extras.mask_samples.tolist() == expected
            assert plan.extras.masks.shape == (1, -(-VOCAB // 32))


def test_it_ends_with_its_last_token_without_another_step():
    harness = Harness(make_config())
    [tokens] = harness.run(constrained(1, [1, 2, 3], length=5))
    stream = harness.streams[1]
    assert (len(tokens), stream.finish) == (5, FinishReason.STOP)
    assert len(harness.plans) == 5
    [tokens] = harness.run(constrained(2, [1, 2, 3], max_tokens=4, length=9))
    assert (len(tokens), harness.streams[2].finish) == (4, FinishReason.LENGTH)


def test_eos_ends_it_where_the_constraint_allows():
    harness = Harness(make_config(eos_token_ids=(3,)))
    [tokens] = harness.run(
        make_request(1, [1, 2], 60, request_constraint=ToyConstraint(VOCAB, 60, may_end=4, eos=3))
    )  # fmt: skip
    assert 4 < len(tokens) < 60 and tokens[-1] == 3 and 3 not in tokens[:-1]
    assert harness.streams[1].finish == FinishReason.STOP


def test_preempted_and_recovered_it_goes_on_where_it_was():
    config = make_config(num_pages=30, page_size=2)
    harness = Harness(config)
    requests = [constrained(i, [i, i + 1, i + 2], 40, length=30) for i in range(1, 5)]
    harness.add(*requests)
    for _ in range(6):
        harness.step()
    harness.recover()
    harness.finish()
    assert harness.scheduler.stats().preemptions > 0
    for request in requests:
        expected = run_alone(request, harness.model, config)
        assert (harness.streams[request.request_id].tokens, FinishReason.STOP) == expected


def test_a_resumed_output_is_replayed_first():
    harness = Harness(make_config())
    [tokens] = harness.run(constrained(1, [1, 2, 3], length=9))
    for known in (1, 8):
        resumed = constrained(10 + known, [1, 2, 3, *tokens[:known]], length=9, request_prompt_len=3)
        harness.add(resumed)
        harness.drain()
        assert harness.streams[10 + known].tokens == tokens[known:]
    over = constrained(30, [1, 2, 3, *tokens], length=9, request_prompt_len=3)
    harness.add(over)
    assert (harness.streams[30].tokens, harness.streams[30].finish) == ([], FinishReason.STOP)
    harness.add(constrained(31, [1, 2, 3, tokens[0], 999], length=9, request_prompt_len=3))
    assert harness.streams[31].finish == FinishReason.ERROR
    assert "do not follow the constraint" in harness.streams[31].error
    assert not harness.scheduler.has_work


def test_a_constraint_that_fails_ends_its_request_alone():
    harness = Harness(make_config())
    bad = make_request(1, [1, 2, 3], 20, request_constraint=ToyConstraint(VOCAB, 15, fails_at=4))
    others = [constrained(2, [4, 5, 6]), make_request(3, [7, 8, 9], 20)]
    harness.add(bad, *others)
    harness.drain()
    assert harness.streams[1].finish == FinishReason.INVALID
    assert harness.streams[1].error == "no mask for this place"
    assert len(harness.streams[1].tokens) == 4
    for request in others:
        stream = harness.streams[request.request_id]
        assert (stream.tokens, stream.finish) == run_alone(request, harness.model, harness.config)
    assert harness.scheduler.stats().free_pages + harness.scheduler.stats().cached_pages == 64


@pytest.mark.parametrize("steps", range(5))
def test_an_abort_leaves_nothing_behind(steps):
    harness = Harness(make_config(max_step_tokens=8))
    harness.add(constrained(1, range(10, 30)))
    for _ in range(steps):
        harness.step()
    harness.plan()
    assert harness.abort(1)
    harness.finish()
    assert not harness.scheduler.rows.constraints and not harness.scheduler.rows.constrained.any()
