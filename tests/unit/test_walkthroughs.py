"""The examples that explain the scheduler, as tests: a reader can follow them with pencil and paper."""

from __future__ import annotations

from kvcache.base import page_slots
from scheduler.cache_manager import CacheManager
from scheduler.request import Req
from scheduler.row_state import RowState
from scheduler.step import StepPlan
from tests.unit.scheduler_harness import Harness, make_config, make_request


def planned(harness: Harness) -> StepPlan:
    assert harness.plan() is not None
    return StepPlan.decode(harness.plans[-1])


def test_free_slots_name_pages_by_their_first_slot() -> None:
    """Three pages of four slots: [0, 4, 8]. Two of them hold eight tokens in slots 0..7."""
    manager = CacheManager(3, 4, "radix", RowState(2, 4, 4))
    assert manager.free_slots.tolist() == [0, 4, 8]
    assert page_slots(manager.free_slots, 4).tolist() == list(range(12))
    assert manager.available_size == 12
    pages = manager.allocate_paged(2)
    assert pages.tolist() == [0, 4]
    assert page_slots(pages, 4).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert manager.free_slots.tolist() == [8] and manager.available_size == 4


def test_out_loc_is_the_page_table_between_cached_len_and_device_len() -> None:
    """page_table[row] = [0, 1, 2, 3, 4, 5, ...]: with four tokens cached and six on the device, out_loc is [4, 5]."""
    harness = Harness(make_config(page_size=1, num_pages=8, max_step_tokens=4))
    harness.add(make_request(1, [10, 11, 12, 13, 14, 15], max_tokens=2))
    first, second = planned(harness), planned(harness)
    assert (int(first.cached_len[0]), int(first.device_len[0])) == (0, 4)
    assert first.out_loc.tolist() == [0, 1, 2, 3]
    assert (int(second.cached_len[0]), int(second.device_len[0])) == (4, 6)
    assert second.out_loc.tolist() == [4, 5]
    assert harness.worker.slots(int(second.rows[0]), 0, 6).tolist() == [0, 1, 2, 3, 4, 5]
    harness.finish()


def test_the_same_with_pages_of_four() -> None:
    """Six tokens lie in pages 0 and 4: the second chunk writes slots 4 and 5, the first decoded token's K/V slot 6."""
    harness = Harness(make_config(page_size=4, num_pages=3, max_step_tokens=4))
    harness.add(make_request(1, [10, 11, 12, 13, 14, 15], max_tokens=3))
    plans = [planned(harness), planned(harness)]
    harness.deliver()
    plans.append(planned(harness))
    assert [plan.out_loc.tolist() for plan in plans] == [[0, 1, 2, 3], [4, 5], [6]]
    assert [plan.page_deltas.tolist() for plan in plans] == [[[0, 0, 0]], [[0, 4, 4]], []]
    harness.finish()


def test_lengths_of_a_request_through_prefill_and_decode() -> None:
    """A prompt of three, none of it cached: extend by 3, sample, then extend by 1 for every token."""
    rows = RowState(1, 4, 4)
    req = Req(make_request(1, [10, 11, 12], max_tokens=3), 0, rows, ())
    req.table_idx = rows.acquire()
    rows.device_len[req.table_idx] = 3
    assert (req.cached_len, req.device_len, req.extend_len) == (0, 3, 3)
    req.complete_one()
    assert (req.cached_len, req.device_len, req.extend_len) == (3, 4, 1)
    req.complete_one()
    assert (req.cached_len, req.device_len, req.extend_len) == (4, 5, 1)


def test_lengths_of_a_request_as_the_workers_see_them() -> None:
    """Page 2, prompt of five, three tokens to generate; then a twin that finds two pages in the tree."""
    harness = Harness(make_config(page_size=2, num_pages=16, overlap_depth=1))
    harness.run(make_request(1, [10, 11, 12, 13, 14], max_tokens=3))
    harness.run(make_request(2, [10, 11, 12, 13, 14], max_tokens=3))
    lengths = [
        (int(plan.cached_len[0]), int(plan.device_len[0]))
        for plan in (StepPlan.decode(buffer) for buffer in harness.plans)
    ]
    assert lengths == [(0, 5), (5, 6), (6, 7), (4, 5), (5, 6), (6, 7)]
    assert harness.streams[2].cached_tokens == 4
    # Seven tokens have their K/V stored (the last one is sampled, not stored): three full pages stay in the tree.
    assert harness.scheduler.stats().cached_pages == 3
