"""The picture of a radix tree: what it says of a node, and that it stays small."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvcache import NodeSummary, RadixPrefixCache, create_prefix_cache


def insert(cache: RadixPrefixCache, ids: list[int]) -> None:
    cache.insert_prefix(ids, np.arange(len(ids)) + 1000 * ids[-1])


def without_time(nodes: list[NodeSummary]) -> list[tuple[int, int, int, int, int]]:
    return [(node.parent, node.tokens, node.hits, node.locks, node.children) for node in nodes]


def test_what_is_shown_of_a_node() -> None:
    cache = RadixPrefixCache(page_size=1)
    assert cache.summary(10) == []
    insert(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 5])
    insert(cache, [9])
    handle = cache.match_prefix([1, 2, 3, 4]).handle
    assert all(node.hits == 0 for node in cache.summary(10))  # a match is not yet a use
    cache.count_hit(handle)
    cache.lock_handle(handle)
    shown = cache.summary(10)
    assert without_time(shown) == [(-1, 2, 1, 1, 2), (0, 2, 1, 1, 0), (-1, 1, 0, 0, 0), (0, 1, 0, 0, 0)]
    assert [node.idle == 0 for node in shown] == [True, True, False, False]
    cache.lock_handle(handle, unlock=True)
    assert all(node.locks == 0 and 0 < node.idle < 60 for node in cache.summary(10))


def test_a_row_that_goes_on_counts_only_what_it_gained() -> None:
    cache = RadixPrefixCache(page_size=1)
    insert(cache, [1, 2, 3, 4])
    start = cache.match_prefix([1, 2]).handle
    cache.count_hit(start)
    cache.count_hit(cache.match_prefix([1, 2, 3, 4], start).handle, start)
    assert [(node.tokens, node.hits) for node in cache.summary(10)] == [(2, 1), (2, 1)]


def test_a_split_keeps_hits_and_age() -> None:
    cache = RadixPrefixCache(page_size=1)
    insert(cache, [1, 2, 3, 4])
    cache.count_hit(cache.match_prefix([1, 2, 3, 4]).handle)
    time.sleep(0.05)
    insert(cache, [1, 2, 7])
    old, gone_on, new = sorted(cache.summary(10), key=lambda node: (-node.hits, -node.tokens, node.parent))
    assert (old.hits, gone_on.hits, new.hits) == (1, 1, 0)
    assert min(old.idle, gone_on.idle) >= 0.05 > 0 <= new.idle


@pytest.mark.parametrize("limit", [1, 7, 50])
def test_it_stays_small_and_parents_come_first(limit: int) -> None:
    cache = RadixPrefixCache(page_size=2)
    rng = np.random.default_rng(0)
    for number in range(300):
        cache.insert_prefix(rng.integers(0, 3, 20), 2 * np.arange(10).repeat(2) + np.tile([0, 1], 10) + 40 * number)
    shown = cache.summary(limit)
    assert len(shown) == limit
    assert all(-1 <= node.parent < index for index, node in enumerate(shown))
    cache.check_integrity([])


def test_the_naive_cache_shows_nothing() -> None:
    assert create_prefix_cache("naive", 4).summary(10) == []
