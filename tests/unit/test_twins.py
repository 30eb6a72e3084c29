"""n copies of a prompt of L tokens prefill exactly L + (n - 1) * (L - (L - 1) // P * P) tokens at page size P."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.scheduler_harness import Harness, make_config, make_request

TWINS = 64


def formula(length: int, page_size: int, copies: int = TWINS) -> int:
    return length + (copies - 1) * (length - (length - 1) // page_size * page_size)


def twin_harness(length: int, page_size: int, budget: int, depth: int = 2) -> Harness:
    pages_each = -(-(length + 16) // page_size)
    config = make_config(
        page_size=page_size,
        num_pages=pages_each + TWINS * (32 // page_size + 2),
        max_running_requests=TWINS,
        max_seq_len=4096,
        max_step_tokens=budget,
        overlap_depth=depth,
    )
    return Harness(config)


CASES = [(2000, 1, 2000 + 63), (2000, 16, 2000 + 1008), (2001, 16, 2001 + 63)]


@pytest.mark.parametrize(("length", "page_size", "expected"), CASES)
@pytest.mark.parametrize("budget", [512, 8192])
@pytest.mark.parametrize("gap", [0, 1, 3], ids=lambda gap: f"every{gap}" if gap else "together")
def test_64_twins_prefill_what_the_formula_says(
    length: int, page_size: int, expected: int, budget: int, gap: int
) -> None:
    assert formula(length, page_size) == expected
    harness = twin_harness(length, page_size, budget)
    prompt = np.random.default_rng(length).integers(10, 1000, length)
    requests = [make_request(i, prompt, max_tokens=3, temperature=1.0, seed=i) for i in range(TWINS)]
    if gap == 0:
        harness.add(*requests)
    else:
        for request in requests:
            harness.add(request)
            for _ in range(gap):
                harness.step()
    harness.finish()
    assert harness.scheduler.stats().prefilled_tokens == expected == harness.worker.prefilled_tokens
    assert harness.scheduler.stats().preemptions == 0
    shared = (length - 1) // page_size * page_size
    found = sorted(stream.cached_tokens for stream in harness.streams.values())
    assert found[-1] == shared and harness.scheduler.stats().cached_tokens == (TWINS - 1) * shared


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("budget", [1, 5, 17, 64])
def test_twins_at_odd_budgets(depth: int, page_size: int, budget: int) -> None:
    """Chunks that end anywhere: still nobody computes a page twice."""
    config = make_config(page_size=page_size, num_pages=400 // page_size, max_step_tokens=budget, overlap_depth=depth)
    for length in (1, 15, 16, 17, 50):
        harness = Harness(config)
        prompt = np.arange(10, 10 + length)
        harness.run(*(make_request(i, prompt, max_tokens=2) for i in range(5)))
        assert harness.prefilled_tokens == formula(length, page_size, 5), f"length {length}"


def test_two_long_prompts_side_by_side_compute_their_common_pages_once() -> None:
    """The second is admitted while the first is mid-prefill, shares 40 tokens with it and then goes its own way."""
    harness = Harness(make_config(page_size=4, max_step_tokens=8))
    common = list(range(100, 140))
    harness.add(make_request(1, [*common, *range(200, 220)]), make_request(2, [*common, *range(300, 320)]))
    harness.finish()
    assert harness.prefilled_tokens == 60 + 20
