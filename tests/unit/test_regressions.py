"""Bugs that the random tests found, each as its smallest example."""

from __future__ import annotations

import pytest

from tests.unit.rule_helpers import EOS, stops_after
from tests.unit.scheduler_harness import Harness, make_config, make_request


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_lone_request_that_stops_just_in_time_is_not_given_up(depth: int) -> None:
    """Eight tokens fit in eight pages, and the third generated one is EOS. With overlap the next (wasted) step wanted
    a ninth page and the request was failed before the result that ends it was in."""
    prompt = list(range(10, 16))
    model, expected = stops_after(prompt, 3)
    harness = Harness(make_config(page_size=1, num_pages=8, overlap_depth=depth, eos_token_ids=(EOS,)), model)
    assert harness.run(make_request(1, prompt, max_tokens=20)) == [expected]


def test_a_blocked_head_of_higher_priority_does_not_end_a_prefill_under_way() -> None:
    """The head found no room beside what the running prefill will want; as nothing else ran, the prefill was failed."""
    harness = Harness(make_config(page_size=1, num_pages=4, max_step_tokens=1, overlap_depth=1, policy="priority"))
    harness.add(make_request(1, [100, 101, 102], max_tokens=0))
    harness.step()
    harness.run(make_request(2, [100, 101, 102], max_tokens=0, request_priority=1))
