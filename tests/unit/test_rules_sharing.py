"""DESIGN's rules about pages that requests share (R1-R4, R11): one test each, which fails when the rule is broken."""

from __future__ import annotations

import pytest

from tests.unit.rule_helpers import EOS, cached_slots, plans_of, stops_after
from tests.unit.scheduler_harness import Harness, make_config, make_request


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("length", [4, 8, 13])
def test_r1_last_prompt_token_is_always_computed(page_size: int, length: int) -> None:
    harness = Harness(make_config(page_size=page_size))
    prompt = list(range(10, 10 + length))
    harness.run(make_request(1, prompt))
    harness.plans.clear()
    harness.run(make_request(2, prompt))
    assert harness.streams[2].cached_tokens == (length - 1) // page_size * page_size
    first = plans_of(harness)[0]
    assert first.device_len[0] == length and first.device_len[0] - first.cached_len[0] >= 1


@pytest.mark.parametrize("depth", [2, 3])
def test_r2_capacity_is_checked_again_after_the_lock(depth: int) -> None:
    """Ten pages: six hold a cold prompt, three a running row, one is free. The newcomer matches the six and needs
    two more: before the lock seven seem to be there, after it only one is, so it waits for the row's three."""
    harness = Harness(make_config(page_size=1, num_pages=10, overlap_depth=depth, max_step_tokens=16))
    cold = [10, 11, 12, 13, 14, 15]
    harness.run(make_request(1, cold, max_tokens=0))
    assert harness.scheduler.stats().cached_pages == 6
    harness.add(make_request(2, [20, 21, 22], max_tokens=1))
    assert harness.plan() is not None
    harness.add(make_request(3, [*cold, 16, 17], max_tokens=1))
    assert harness.plan() is None
    harness.deliver()
    assert harness.plan() is not None
    harness.finish()
    assert harness.streams[3].cached_tokens == 6 and harness.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("depth", [2, 3])
def test_r3_duplicates_are_freed_after_the_last_planned_step_that_reads_them(depth: int) -> None:
    """Two greedy twins write the same tokens into pages of their own and stop together on EOS, which the scheduler
    learns with depth - 1 more steps of both planned. One copy stays in the tree; the other may be free only when
    those steps have returned (the harness compares the free list with every step in flight)."""
    prompt = list(range(10, 18))
    model, expected = stops_after(prompt, 12)
    harness = Harness(make_config(page_size=4, eos_token_ids=(EOS,), overlap_depth=depth), model)
    outputs = harness.run(make_request(1, prompt, max_tokens=40), make_request(2, prompt, max_tokens=40))
    assert outputs == [expected, expected]
    assert cached_slots(harness) == (len(prompt) + len(expected) - 1) // 4 * 4
    # One twin goes on longer: its first pages are duplicates, its last ones are not.
    harness = Harness(make_config(page_size=4, overlap_depth=depth))
    harness.run(make_request(1, prompt, max_tokens=9), make_request(2, prompt, max_tokens=22))
    assert cached_slots(harness) == 28


def test_r4_the_tail_page_is_private_and_freed_once() -> None:
    harness = Harness(make_config(page_size=16, num_pages=8))
    prompt = list(range(10, 30))
    harness.add(make_request(1, prompt, max_tokens=5), make_request(2, prompt, max_tokens=5))
    while harness.scheduler.has_work:
        harness.step()
        tails = {int(harness.worker.page_table[row, 1]) for row in (0, 1)} - {-1}
        if len(harness.plans) > 1:
            assert len(tails) == 2, "twins share the page that both still write to"
        assert harness.scheduler.stats().cached_pages <= 1
    harness.finish()
    stats = harness.scheduler.stats()
    assert (stats.cached_pages, stats.free_pages) == (1, 7)
    assert len(harness.free_pages()) == 7
    harness.run(make_request(3, prompt, max_tokens=20))  # 39 stored: the second page is full now, the third is a tail
    assert (harness.scheduler.stats().cached_pages, len(harness.free_pages())) == (2, 6)


@pytest.mark.parametrize("budget", [1, 3, 5, 7])
def test_r11_chunks_end_anywhere_but_only_full_pages_are_shared(budget: int) -> None:
    harness = Harness(make_config(page_size=4, max_step_tokens=budget, overlap_depth=1))
    prompt = list(range(10, 33))
    harness.add(make_request(1, prompt, max_tokens=2))
    ends = []
    while len(ends) < 3:
        plan = harness.plan()
        assert plan is not None
        ends.append(int(plan.device_len[0]))
        assert cached_slots(harness) == ends[-1] // 4 * 4
        harness.deliver()
    harness.add(make_request(2, prompt, max_tokens=2))
    harness.finish()
    assert harness.prefilled_tokens == 23 + 3
    assert budget > 4 or any(end % 4 for end in ends), "a budget below a page must cut pages"
