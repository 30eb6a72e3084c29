"""The digest by itself; `test_radix_stateful.py` holds it against the tree."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvcache import CacheError, IntegrityError, PrefixDigest, RadixPrefixCache
from kvcache.digest import prefix_hashes


def span(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def test_hashes_are_the_same_in_every_process() -> None:
    script = "from kvcache.digest import prefix_hashes; print(prefix_hashes(range(10), 4).tolist())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(prefix_hashes(range(10), 4).tolist())
    assert prefix_hashes(span(0, 10), 4).dtype == np.uint64


def test_a_hash_is_of_all_tokens_before_it() -> None:
    ids = span(0, 12)
    other = ids.copy()
    other[0] = 99
    assert prefix_hashes(ids, 4).tolist() == [*prefix_hashes(ids[:8], 4).tolist(), prefix_hashes(ids, 4)[2]]
    assert not set(prefix_hashes(ids, 4).tolist()) & set(prefix_hashes(other, 4).tolist())
    assert prefix_hashes(ids[:3], 4).tolist() == []


def test_changes() -> None:
    digest = PrefixDigest(granularity=4)
    cache = RadixPrefixCache(2, digest)
    cache.insert_prefix(span(0, 10), span(0, 10))
    hashes = prefix_hashes(span(0, 10), 4).tolist()
    change = digest.take_changes()
    assert change.full
    assert change.added.tolist() == hashes
    longer = np.concatenate([span(0, 10), span(50, 6)])
    cache.insert_prefix(longer, span(100, 16))
    change = digest.take_changes()
    assert not change.full
    assert change.added.tolist() == prefix_hashes(longer, 4).tolist()[2:]
    assert change.removed.tolist() == []
    cache.evict(4)  # 16 tokens become 12
    change = digest.take_changes()
    assert (change.added.tolist(), change.removed.tolist()) == ([], prefix_hashes(longer, 4).tolist()[3:])
    cache.reset()
    change = digest.take_changes()
    assert change.full
    assert change.added.tolist() == []


def test_what_comes_and_goes_between_readings_is_no_change() -> None:
    digest = PrefixDigest(granularity=2)
    cache = RadixPrefixCache(2, digest)
    digest.take_changes()
    cache.insert_prefix(span(0, 6), span(0, 6))
    cache.evict(6)
    change = digest.take_changes()
    assert (change.full, change.added.tolist(), change.removed.tolist()) == (False, [], [])


def test_many_changes_are_told_as_a_full_copy() -> None:
    digest = PrefixDigest(granularity=1, max_hashes=4)
    cache = RadixPrefixCache(1, digest)
    digest.take_changes()
    for i in range(4):
        cache.insert_prefix(span(10 * i, 4), span(10 * i, 4))
        digest.take_changes() if i == 0 else None
        cache.evict(4)
    cache.insert_prefix(span(70, 3), span(70, 3))
    change = digest.take_changes()
    assert change.full
    assert change.added.tolist() == prefix_hashes(span(70, 3), 1).tolist()


def test_the_bound() -> None:
    """When the digest is full, what comes later is left out, and so is everything below it, also when room is back."""
    digest = PrefixDigest(granularity=2, max_hashes=3)
    cache = RadixPrefixCache(2, digest)
    cache.insert_prefix(span(50, 2), span(50, 2))
    cache.insert_prefix(span(0, 8), span(0, 8))
    assert len(digest) == 3  # one of the first, two of the four of the second
    cache.evict(2)
    assert len(digest) == 2
    cache.insert_prefix(span(0, 12), span(20, 12))
    cache.check_integrity()
    assert sorted(digest.hashes().tolist()) == sorted(prefix_hashes(span(0, 4), 2).tolist())


def test_granularity_must_be_whole_pages() -> None:
    with pytest.raises(CacheError, match="must be a multiple of page_size 16"):
        RadixPrefixCache(16, PrefixDigest(granularity=24))
    with pytest.raises(CacheError, match="at least 1"):
        PrefixDigest(granularity=0)


def test_integrity() -> None:
    digest = PrefixDigest(granularity=2)
    cache = RadixPrefixCache(2, digest)
    node = cache.insert_prefix(span(0, 4), span(0, 4)).handle.node
    digest._by_node[node][0] = bytes(8)
    with pytest.raises(IntegrityError, match="digest of the node that ends at 4 is wrong"):
        cache.check_integrity()
    del digest._by_node[node]
    with pytest.raises(IntegrityError, match="the digest counts 2 hashes"):
        cache.check_integrity()
