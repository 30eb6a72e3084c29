"""Handles of the radix tree: locks, going on from one, and calls that are refused."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import CacheError, RadixPrefixCache, create_prefix_cache
from tests.unit.radix_text import edges, hello_cache, span, text


class TestHandles:
    def test_a_handle_stays_right_when_its_node_is_split(self) -> None:
        cache = RadixPrefixCache(page_size=1)
        handle = cache.insert_prefix(text("abcdef"), span(0, 6)).handle
        cache.lock_handle(handle)
        shorter = cache.match_prefix(text("abc")).handle
        cache.lock_handle(shorter)
        cache.check_integrity([handle, shorter])
        cache.lock_handle(handle, unlock=True)
        assert cache.size_info == (3, 3)
        assert cache.evict(3).tolist() == [3, 4, 5]
        cache.lock_handle(shorter, unlock=True)
        cache.check_integrity([])

    def test_locks_are_counted(self) -> None:
        cache = RadixPrefixCache(page_size=1)
        handle = cache.insert_prefix(text("abc"), span(0, 3)).handle
        cache.lock_handle(handle)
        cache.lock_handle(handle)
        cache.check_integrity([handle, handle])
        cache.lock_handle(handle, unlock=True)
        assert cache.size_info == (0, 3)
        cache.lock_handle(handle, unlock=True)
        assert cache.size_info == (3, 0)
        with pytest.raises(CacheError, match="not locked"):
            cache.lock_handle(handle, unlock=True)

    def test_the_empty_prefix_can_be_locked(self) -> None:
        cache = RadixPrefixCache(page_size=1)
        handle = cache.match_prefix(text("abc")).handle
        cache.lock_handle(handle)
        cache.check_integrity([handle])
        cache.lock_handle(handle, unlock=True)
        cache.check_integrity([])

    def test_stale_handles_are_refused(self) -> None:
        cache = RadixPrefixCache(page_size=1)
        handle = cache.insert_prefix(text("abcd"), span(0, 4)).handle
        cache.evict(1)
        for use in (
            lambda: cache.lock_handle(handle),
            lambda: cache.match_prefix(text("abcde"), start=handle),
            lambda: cache.insert_prefix(text("abcde"), [9], start=handle),
        ):
            with pytest.raises(CacheError, match="stale"):
                use()
        cache.evict(3)
        with pytest.raises(CacheError, match="stale"):
            cache.lock_handle(handle)

    def test_reset_makes_handles_stale(self) -> None:
        cache = hello_cache()
        empty = cache.match_prefix(text("x")).handle
        handle = cache.match_prefix(text("Hello")).handle
        cache.lock_handle(handle)
        cache.reset()
        assert cache.size_info == (0, 0)
        assert edges(cache) == []
        for old in (empty, handle):
            with pytest.raises(CacheError, match="stale"):
                cache.lock_handle(old, unlock=True)
        cache.check_integrity([])
        assert cache.insert_prefix(text("Hello"), span(0, 5)).cached_len == 0


class TestGoingOn:
    """A match or an insert that goes on from a handle pays for, and returns, the new part only."""

    def test_match(self) -> None:
        cache = hello_cache()
        handle = cache.match_prefix(text("Hello ")).handle
        go_on = cache.match_prefix(text("?????? world how?")[:6].tolist() + text("world how?").tolist(), start=handle)
        assert go_on.handle.cached_len == 15
        assert go_on.indices.tolist() == [*range(6, 11), *range(211, 215)]

    def test_insert(self) -> None:
        cache = RadixPrefixCache(page_size=2)
        ids = span(0, 12)
        first = cache.insert_prefix(ids[:4], span(0, 4)).handle
        cache.lock_handle(first)
        second = cache.insert_prefix(ids[:9], span(10, 5), start=first)
        assert (second.cached_len, second.handle.cached_len) == (4, 8)
        twin = cache.insert_prefix(ids, span(20, 8), start=first)
        assert (twin.cached_len, twin.handle.cached_len) == (8, 12)
        assert cache.match_prefix(ids).indices.tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 24, 25, 26, 27]
        cache.check_integrity([first])

    def test_too_few_tokens(self) -> None:
        cache = hello_cache()
        handle = cache.match_prefix(text("Hello ")).handle
        with pytest.raises(CacheError, match="3 token ids cannot go on from a prefix of 6"):
            cache.match_prefix(text("Hel"), start=handle)


class TestErrors:
    def test_evicting_too_much_changes_nothing(self) -> None:
        cache = hello_cache()
        handle = cache.match_prefix(text("Hello world")).handle
        cache.lock_handle(handle)
        with pytest.raises(CacheError, match="cannot evict 18 tokens: 17 are evictable and 11 protected"):
            cache.evict(18)
        assert cache.size_info == (17, 11)
        cache.check_integrity([handle])

    def test_slots_that_disagree_with_the_ids(self) -> None:
        cache = RadixPrefixCache(page_size=1)
        with pytest.raises(CacheError, match="3 token ids from position 0 on, but 2 slots"):
            cache.insert_prefix(span(0, 3), span(0, 2))

    @pytest.mark.parametrize("slots", [[1, 2, 3, 4], [0, 1, 2, 4], [4, 5, 6, 7, 9, 10, 11, 12]])
    def test_slots_that_are_not_pages(self, slots: list[int]) -> None:
        cache = RadixPrefixCache(page_size=4)
        with pytest.raises(CacheError, match="whole pages of 4"):
            cache.insert_prefix(span(0, len(slots)), slots)
        assert cache.size_info == (0, 0)
        cache.check_integrity([])

    def test_two_dimensions(self) -> None:
        with pytest.raises(CacheError, match="one-dimensional"):
            RadixPrefixCache(page_size=1).match_prefix(np.zeros((2, 2), np.int32))

    @pytest.mark.parametrize("kind", ["radix", "naive"])
    def test_page_size(self, kind: str) -> None:
        with pytest.raises(CacheError, match="page_size must be at least 1, got 0"):
            create_prefix_cache(kind, 0)

    def test_unknown_kind(self) -> None:
        with pytest.raises(CacheError, match="unknown prefix cache 'lru'; known are naive, radix"):
            create_prefix_cache("lru", 1)
