"""The radix tree, case by case: matches, splits, evictions, pages. `test_radix_stateful.py` has it against a model."""

from __future__ import annotations

import numpy as np

from kvcache import RadixPrefixCache
from kvcache.base import page_slots
from tests.unit.radix_text import edges, hello_cache, span, text


class TestHello:
    """The walk-through: "Hello world", "Hello there", "Hello world how are you"."""

    def test_splits(self) -> None:
        cache = RadixPrefixCache(page_size=1)
        assert cache.insert_prefix(text("Hello world"), span(0, 11)).cached_len == 0
        assert edges(cache) == ["Hello world"]
        assert cache.insert_prefix(text("Hello there"), span(100, 11)).cached_len == 6
        assert edges(cache) == ["Hello ", "world", "there"]
        result = cache.insert_prefix(text("Hello world how are you"), span(200, 23))
        assert (result.cached_len, result.handle.cached_len) == (11, 23)
        assert edges(cache) == ["Hello ", "world", "there", " how are you"]
        assert cache.size_info == (6 + 5 + 5 + 12, 0)
        cache.check_integrity([])

    def test_match_returns_the_first_inserters_slots(self) -> None:
        match = hello_cache().match_prefix(text("Hello world how is she"))
        assert match.handle.cached_len == 16
        assert match.indices.tolist() == [*range(11), *range(211, 216)]
        assert match.indices.dtype == np.int32

    def test_match_nothing(self) -> None:
        handle, indices = hello_cache().match_prefix(text("Goodbye"))
        assert handle.cached_len == 0
        assert indices.shape == (0,)
        assert indices.dtype == np.int32

    def test_lock_protects_to_the_root(self) -> None:
        cache = hello_cache()
        handle = cache.match_prefix(text("Hello world")).handle
        cache.lock_handle(handle)
        assert cache.size_info == (17, 11)
        cache.check_integrity([handle])
        assert sorted(cache.evict(17)) == sorted([*range(106, 111), *range(211, 223)])
        assert edges(cache) == ["Hello ", "world"]
        cache.lock_handle(handle, unlock=True)
        assert cache.size_info == (11, 0)
        assert sorted(cache.evict(11)) == [*range(11)]
        cache.check_integrity([])

    def test_whole_leaves_free_more_than_asked(self) -> None:
        cache = hello_cache()
        assert cache.evict(3, partial=False).tolist() == [*range(106, 111)]
        assert cache.evict(3, partial=False).tolist() == [*range(211, 223)]
        assert edges(cache) == ["Hello ", "world"]
        cache.check_integrity([])

    def test_part_of_a_leaf_from_its_end(self) -> None:
        cache = hello_cache()
        assert cache.evict(3).tolist() == [108, 109, 110]
        assert edges(cache) == ["Hello ", "world", "th", " how are you"]
        assert cache.evict(3).tolist() == [106, 107, 222]
        cache.check_integrity([])

    def test_a_match_makes_it_recent(self) -> None:
        cache = hello_cache()
        cache.match_prefix(text("Hello there"))
        assert cache.evict(12).tolist() == [*range(211, 223)]

    def test_the_pages_in_the_tree(self) -> None:
        cache = hello_cache()
        assert sorted(cache.page_starts()) == [*range(11), *range(106, 111), *range(211, 223)]
        cache.reset()
        assert cache.page_starts().tolist() == []

    def test_a_peek_leaves_no_trace(self) -> None:
        cache = hello_cache()
        assert cache.peek(text("Hello the end")) == 9
        assert edges(cache) == ["Hello ", "world", "there", " how are you"]
        assert cache.evict(5).tolist() == [*range(106, 111)]


class TestPages:
    def test_only_full_pages(self) -> None:
        cache = RadixPrefixCache(page_size=4)
        result = cache.insert_prefix(span(0, 10), span(40, 10))
        assert (result.cached_len, result.handle.cached_len) == (0, 8)
        assert cache.size_info.total_size == 8
        assert cache.match_prefix(span(0, 7)).indices.tolist() == [40, 41, 42, 43]
        assert cache.match_prefix(span(0, 3)).handle.cached_len == 0

    def test_edges_part_on_page_borders(self) -> None:
        cache = RadixPrefixCache(page_size=4)
        cache.insert_prefix(span(0, 12), span(0, 12))
        other = span(0, 12)
        other[6] = 99
        assert cache.insert_prefix(other, span(12, 12)).cached_len == 4
        assert cache.match_prefix(other).indices.tolist() == [*range(4), *range(16, 24)]
        cache.check_integrity([])

    def test_pages_need_not_follow_each_other(self) -> None:
        cache = RadixPrefixCache(page_size=2)
        cache.insert_prefix(span(0, 6), np.array([8, 9, 2, 3, 6, 7], np.int32))
        assert cache.match_prefix(span(0, 6)).indices.tolist() == [8, 9, 2, 3, 6, 7]
        assert cache.evict(3).tolist() == [2, 3, 6, 7]

    def test_evict_rounds_up_to_pages(self) -> None:
        cache = RadixPrefixCache(page_size=4)
        cache.insert_prefix(span(0, 16), span(0, 16))
        assert cache.evict(5).tolist() == [*range(8, 16)]
        assert cache.evict(0).tolist() == []
        assert cache.size_info == (8, 0)

    def test_the_result_is_the_callers_own(self) -> None:
        cache = RadixPrefixCache(page_size=1)
        ids, slots = span(0, 4), span(10, 4)
        cache.insert_prefix(ids, slots)
        ids[:] = slots[:] = 0
        cache.match_prefix(span(0, 4)).indices[:] = -1
        assert cache.match_prefix(span(0, 4)).indices.tolist() == [10, 11, 12, 13]

    def test_lists_and_int64_are_taken(self) -> None:
        cache = RadixPrefixCache(page_size=2)
        cache.insert_prefix([1, 2, 3, 4], np.array([6, 7, 2, 3]))
        assert cache.match_prefix([1, 2, 9, 9]).indices.tolist() == [6, 7]


def test_page_slots() -> None:
    """Free page starts [0, 4, 8] at page size 4 are the token slots 0 to 11."""
    assert page_slots(np.array([0, 4, 8], np.int32), 4).tolist() == list(range(12))
