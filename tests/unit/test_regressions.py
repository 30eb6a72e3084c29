"""Bugs that the random tests found, each as its smallest example."""

from __future__ import annotations

import pytest

from tests.unit.scheduler_harness import Harness, make_config, make_request
from tests.unit.test_rules import EOS, stops_after


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_lone_request_that_stops_just_in_time_is_not_given_up(depth: int) -> None:
    """Eight tokens fit in eight pages, and the third generated one is EOS. With overlap the next (wasted) step wanted
    a ninth page and the request was failed before the result that ends it was in."""
    prompt = list(range(10, 16))
    model, expected = stops_after(prompt, 3)
    harness = Harness(make_config(page_size=1, num_pages=8, overlap_depth=depth, eos_token_ids=(EOS,)), model)
    assert harness.run(make_request(1, prompt, max_tokens=20)) == [expected]
