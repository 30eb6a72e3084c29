from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvcache import CacheError, CacheHandle, IntegrityError, NaivePrefixCache, create_prefix_cache


@pytest.fixture
def cache() -> NaivePrefixCache:
    cache = create_prefix_cache("naive", 4)
    assert isinstance(cache, NaivePrefixCache)
    return cache


def test_keeps_nothing(cache: NaivePrefixCache) -> None:
    ids = np.arange(8, dtype=np.int32)
    result = cache.insert_prefix(ids, ids)
    assert result.cached_len == 0
    assert result.handle.cached_len == 0
    assert cache.size_info == (0, 0)


def test_never_matches(cache: NaivePrefixCache) -> None:
    ids = np.arange(8, dtype=np.int32)
    handle = cache.insert_prefix(ids, ids).handle
    match = cache.match_prefix(ids, start=handle)
    assert match.handle.cached_len == 0
    assert match.indices.shape == (0,)
    assert match.indices.dtype == np.int32


def test_locks_protect_nothing(cache: NaivePrefixCache) -> None:
    handle = cache.match_prefix([1, 2, 3]).handle
    cache.lock_handle(handle)
    assert cache.size_info == (0, 0)
    cache.lock_handle(handle, unlock=True)
    cache.check_integrity([handle])


def test_refuses_to_evict(cache: NaivePrefixCache) -> None:
    with pytest.raises(CacheError, match="cannot evict 1 tokens: the naive cache holds none"):
        cache.evict(1)
    assert cache.evict(0).shape == (0,)


def test_reset_and_integrity(cache: NaivePrefixCache) -> None:
    cache.reset()
    cache.check_integrity()
    assert cache.page_starts().tolist() == []
    with pytest.raises(IntegrityError, match="does not come from this naive cache"):
        cache.check_integrity([CacheHandle(4, object())])


def test_importing_the_caches_does_not_import_torch() -> None:
    script = "import sys, kvcache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
