"""DESIGN's rule that every page is in exactly one place (R10), broken in every way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcache.base import IntegrityError
from tests.unit.rule_helpers import busy_run, plans_of
from tests.unit.scheduler_harness import Harness, make_config, make_request


def leak_a_page(harness: Harness, row: int, other: int) -> None:
    harness.scheduler.cache.allocator.allocate(1)


def free_a_private_page(harness: Harness, row: int, other: int) -> None:
    harness.scheduler.cache.allocator.free(harness.scheduler.rows.page_table[row, 2:3])


def free_a_shared_page(harness: Harness, row: int, other: int) -> None:
    harness.scheduler.cache.allocator.free(harness.scheduler.rows.page_table[row, 0:1])


def point_at_a_free_page(harness: Harness, row: int, other: int) -> None:
    harness.scheduler.rows.page_table[row, 2] = harness.scheduler.cache.free_slots[0]


def point_at_another_rows_page(harness: Harness, row: int, other: int) -> None:
    harness.scheduler.rows.page_table[row, 2] = harness.scheduler.rows.page_table[other, 2]


def point_a_shared_position_elsewhere(harness: Harness, row: int, other: int) -> None:
    harness.scheduler.rows.page_table[row, 0] = harness.scheduler.rows.page_table[row, 1]


def quarantine_a_free_page(harness: Harness, row: int, other: int) -> None:
    harness.scheduler.cache.quarantine(harness.scheduler.cache.free_slots[:1], 10**6)


def forget_a_lock(harness: Harness, row: int, other: int) -> None:
    cache = harness.scheduler.cache
    cache.unlock(cache.prefix_cache.match_prefix(harness.scheduler.rows.tokens[row, :8]).handle)


@pytest.mark.parametrize(
    "damage",
    [
        leak_a_page, free_a_private_page, free_a_shared_page, point_at_a_free_page, point_at_another_rows_page,
        point_a_shared_position_elsewhere, quarantine_a_free_page, forget_a_lock,
    ],
)  # fmt: skip
def test_r10_the_checker_finds_every_kind_of_wrong_page(damage: Callable[[Harness, int, int], None]) -> None:
    """Two rows of ten prompt tokens at page 4: two shared pages in the tree each and a private third."""
    harness = Harness(make_config(page_size=4, num_pages=20))
    harness.add(make_request(1, range(10, 20), max_tokens=9), make_request(2, range(30, 40), max_tokens=9))
    harness.step()
    row, other = plans_of(harness)[0].rows[:2].tolist()
    harness.scheduler.check_integrity()
    damage(harness, row, other)
    with pytest.raises(IntegrityError):
        harness.scheduler.check_integrity()


def test_r10_holds_after_every_step_of_a_busy_run() -> None:
    """Every page in one place at every moment (the harness asks the checker after every event)."""
    assert busy_run() != busy_run("fair_share")


def test_r10_a_page_that_a_twin_made_superfluous_comes_back() -> None:
    """A prompt stops inside its first page, its twin of higher priority goes first and fills one: the first prompt goes
    on from the twin's, and its own waits in quarantine."""
    harness = Harness(make_config(page_size=4, max_step_tokens=3, policy="priority"))
    harness.add(make_request(1, range(10, 22)))
    harness.plan()
    harness.add(make_request(2, range(10, 22), request_priority=1))
    quarantined = 0
    while harness.scheduler.has_work:
        harness.plan()
        quarantined = max(quarantined, harness.scheduler.cache.quarantined_pages)
        harness.deliver()
    assert quarantined == 1
    harness.finish()
