"""The radix tree's checker finds what it says it checks."""

from __future__ import annotations

import pytest

from kvcache import CacheHandle, IntegrityError, RadixPrefixCache
from tests.unit.radix_text import hello_cache, span, text


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
