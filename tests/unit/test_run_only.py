"""`Scheduler.run_only`: one request runs, the others wait with all they have; and what is asked before a recovery."""

from __future__ import annotations

import random

import pytest

from scheduler.outputs import FinishReason
from scheduler.request import ReqState
from tests.unit.scheduler_harness import Harness, make_config, make_request


def long_requests(count: int, max_tokens: int = 30) -> list:
    return [make_request(number, range(number, number + 20), max_tokens, seed=number) for number in range(1, count + 1)]


def tokens(harness: Harness) -> dict[int, int]:
    return {number: len(stream.tokens) for number, stream in harness.streams.items()}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "longest_prefix", "priority", "fair_share"])
def test_only_that_request_runs_and_all_end_as_they_would_alone(policy: str, depth: int) -> None:
    harness = Harness(make_config(policy=policy, overlap_depth=depth))
    harness.add(*long_requests(6))
    for _ in range(8):
        harness.step()
    harness.scheduler.run_only(4)
    while harness.deliver():  # what was in flight counts still
        pass
    before = tokens(harness)
    harness.add(make_request(7, range(9), 5))
    for _ in range(10):
        harness.step()
    after = tokens(harness)
    assert after[4] > before[4]
    assert all(after[number] == before[number] for number in before if number != 4)
    assert harness.scheduler.stats().waiting == 6
    harness.scheduler.run_only(2)
    for _ in range(10):
        harness.step()
    assert tokens(harness)[2] > after[2]
    harness.scheduler.run_only(None)
    harness.finish()


def test_after_a_recovery_one_after_the_other_in_any_order() -> None:
    harness = Harness(make_config())
    harness.add(*long_requests(8))
    for _ in range(6):
        harness.step()
    harness.recover()
    for number in (5, 8, 1):
        harness.scheduler.run_only(number)
        before = tokens(harness)
        for _ in range(6):
            harness.step()
        assert {n for n, count in tokens(harness).items() if count > before[n]} >= {number}
    harness.recover()  # while only one may run
    harness.step()
    assert list(harness.scheduler.requests_in_flight()) == [1]
    harness.scheduler.run_only(None)
    harness.finish()


def test_a_held_request_can_be_aborted_and_a_poison_one_ended_with_its_reason() -> None:
    harness = Harness(make_config())
    harness.add(*long_requests(4))
    harness.step()
    harness.recover()
    harness.scheduler.run_only(1)
    assert harness.abort(2)
    harness.scheduler.fail_poison(1, "it breaks the ranks")
    harness.scheduler.fail_poison(99, "unknown")
    outputs = harness.scheduler.take_outputs()
    assert outputs.request_ids.tolist() == [1] and outputs.finish.tolist() == [FinishReason.POISON]
    assert outputs.errors == {1: "it breaks the ranks"}
    assert not harness.step() and harness.scheduler.has_work  # nobody may run
    harness.scheduler.run_only(None)
    harness.drain()
    assert [harness.streams[number].finish for number in (2, 3, 4)] == [3, 2, 2]
    assert all(req.state is ReqState.ENDED for req in harness.scheduler._table.unfinished.values())


def test_requests_in_flight_are_those_of_plans_that_have_not_returned() -> None:
    harness = Harness(make_config(max_step_tokens=16, overlap_depth=1))
    harness.add(*long_requests(3))
    assert harness.scheduler.requests_in_flight() == {}
    harness.plan()  # 16 tokens of the first prompt
    assert harness.scheduler.requests_in_flight() == {1: 20}
    harness.deliver()
    assert harness.scheduler.requests_in_flight() == {}
    harness.plan()
    assert harness.scheduler.requests_in_flight() == {1: 20, 2: 20}
    harness.deliver()
    assert harness.scheduler.known_len(1) == 21
    harness.finish()
    assert harness.scheduler.known_len(1) is None


@pytest.mark.parametrize("seed", range(6))
def test_random_holds_recoveries_and_aborts(seed: int) -> None:
    rng = random.Random(seed)
    harness = Harness(make_config(num_pages=24, max_step_tokens=24, policy=rng.choice(["fcfs", "fair_share"])))
    number = 0
    for _ in range(300):
        live = [n for n, stream in harness.streams.items() if stream.finish == FinishReason.NONE]
        event = rng.random()
        if event < 0.15 and len(live) < 12:
            number += 1
            prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
            harness.add(make_request(number, prompt, rng.randrange(0, 40), seed=number))
        elif event < 0.25 and live:
            harness.scheduler.run_only(rng.choice(live))
        elif event < 0.3:
            harness.scheduler.run_only(None)
        elif event < 0.33:
            harness.recover()
        elif event < 0.36 and live:
            harness.abort(rng.choice(live))
        else:
            harness.step()
    harness.scheduler.run_only(None)
    harness.finish()
