"""The radix tree, case by case. `test_radix_stateful.py` holds it against a model."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from kvcache import CacheError, CacheHandle, IntegrityError, RadixPrefixCache, create_prefix_cache
from kvcache.base import page_slots


def text(string: str) -> np.ndarray:
    return np.frombuffer(string.encode(), np.uint8).astype(np.int32)


def span(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def edges(cache: RadixPrefixCache) -> list[str]:
    """The text of every edge, parents first, in the order of insertion."""
    todo, found = [cache._root], []
    while todo:
        node = todo.pop(0)
        found.append(np.frombuffer(node.key, np.int32).astype(np.uint8).tobytes().decode())
        todo += (node.children or {}).values()
    return found[1:]


def hello_cache() -> RadixPrefixCache:
    """Three greetings, inserted one after the other with slots 0-10, 100-110 and 200-222."""
    cache = RadixPrefixCache(page_size=1)
    cache.insert_prefix(text("Hello world"), span(0, 11))
    cache.insert_prefix(text("Hello there"), span(100, 11))
    cache.insert_prefix(text("Hello world how are you"), span(200, 23))
    return cache


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

    def test_cost_is_of_the_new_part(self) -> None:
        cache = RadixPrefixCache(page_size=16)
        ids = span(0, 1 << 20)
        handle = cache.insert_prefix(ids, span(0, len(ids))).handle
        cache.lock_handle(handle)

        def cost(start: CacheHandle | None) -> float:
            begin = time.perf_counter()
            for _ in range(5):
                cache.match_prefix(ids, start=start)
            return time.perf_counter() - begin

        assert min(cost(handle) for _ in range(3)) * 10 < min(cost(None) for _ in range(3))


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


class TestIntegrity:
    """`check_integrity` finds what it says it checks."""

    def broken(self, message: str, cache: RadixPrefixCache, held: list[CacheHandle] | None = None) -> None:
        with pytest.raises(IntegrityError, match=message):
            cache.check_integrity(held)

    def test_sizes(self) -> None:
        cache = hello_cache()
        cache._evictable += 1
        self.broken("a walk finds 28 evictable", cache)

    def test_a_lock_that_nobody_holds(self) -> None:
        cache = hello_cache()
        cache.lock_handle(cache.match_prefix(text("Hello")).handle)
        cache.check_integrity()
        self.broken("its handles disagree", cache, [])

    def test_a_handle_that_is_not_locked(self) -> None:
        cache = hello_cache()
        self.broken("its handles disagree", cache, [cache.match_prefix(text("Hello")).handle])

    def test_ref_counts(self) -> None:
        cache = hello_cache()
        cache.match_prefix(text("Hello")).handle.node.refs += 1
        self.broken("counts 1 locks, expected 0", cache)

    def test_a_slot_twice(self) -> None:
        cache = hello_cache()
        cache.insert_prefix(text("Bye"), [0, 500, 501])
        self.broken("twice", cache)

    def test_unaligned_edge(self) -> None:
        cache = RadixPrefixCache(page_size=2)
        node = cache.insert_prefix(span(0, 4), span(0, 4)).handle.node
        node.key = node.key[:-4]
        node.end -= 1
        self.broken("an edge of 3.0 tokens and 2.0 pages", cache)

    def test_filed_under_another_page(self) -> None:
        cache = hello_cache()
        cache._root.children = {b"none": cache._root.children.popitem()[1]}
        self.broken("filed under another page", cache)

    def test_the_eviction_list(self) -> None:
        cache = hello_cache()
        cache._root.newer.unlink()
        self.broken("4 nodes are unlocked, 3 are in the eviction list", cache)

    def test_a_parent_before_its_child(self) -> None:
        cache = hello_cache()
        top = cache._root.older
        top.unlink()
        top.link_before(cache._root.newer)
        self.broken("evicted after its parent", cache)


def test_memory_per_token() -> None:
    """At most 20 bytes a cached token in the process, whatever arrays the slots and ids came from."""
    script = """
import gc, sys
import numpy as np, psutil
from kvcache import RadixPrefixCache
def fill(prompts):
    cache = RadixPrefixCache(16)
    for i in range(prompts):
        ids = np.random.randint(0, 100_000, 100_000).astype(np.int32)  # views of these must not stay
        cache.insert_prefix(ids[:4096], np.arange(i * 4096, (i + 1) * 4096, dtype=np.int32))
        for cut in range(256, 4096, 256):
            ids[cut] += 1
            cache.match_prefix(ids[:4096])
            ids[cut] -= 1
    return cache
fill(4)
gc.collect()
before = psutil.Process().memory_info().rss
cache = fill(250)
gc.collect()
print((psutil.Process().memory_info().rss - before) / cache.size_info.total_size)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) <= 20


def test_evicting_costs_what_is_freed() -> None:
    """Freeing 64 pages of a tree of 10,000 leaves takes about as long as of one of 300."""

    def cost(leaves: int) -> float:
        cache = RadixPrefixCache(page_size=4)
        for i in range(leaves):
            cache.insert_prefix(span(4 * i, 4), span(4 * i, 4))
        best = float("inf")
        for _ in range(4):
            begin = time.perf_counter()
            cache.evict(256)
            best = min(best, time.perf_counter() - begin)
        return best

    small, large = cost(300), cost(10_000)
    assert large < 4 * small


def test_page_slots() -> None:
    """Free page starts [0, 4, 8] at page size 4 are the token slots 0 to 11."""
    assert page_slots(np.array([0, 4, 8], np.int32), 4).tolist() == list(range(12))
