"""A prefix cache that caches nothing: the switch for measuring what prefix reuse is worth."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvcache.base import (
    BasePrefixCache,
    CacheError,
    CacheHandle,
    InsertResult,
    IntArray,
    IntegrityError,
    Ints,
    MatchResult,
    NodeSummary,
    SizeInfo,
)
from kvcache.digest import PrefixDigest


class NaivePrefixCache(BasePrefixCache):
    """Never matches and keeps nothing, so a running row keeps all its pages. It refuses to evict."""

    def __init__(self, page_size: int, digest: PrefixDigest | None = None) -> None:
        if page_size < 1:
            raise CacheError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.digest = digest  # stays empty, as the cache does
        self._empty = CacheHandle(0, None)

    def match_prefix(self, ids: Ints, start: CacheHandle | None = None) -> MatchResult:
        return MatchResult(self._empty, np.empty(0, np.int32))

    def insert_prefix(self, ids: Ints, indices: Ints, start: CacheHandle | None = None) -> InsertResult:
        return InsertResult(0, self._empty)

    def insert_pages(self, ids: Ints, page_starts: Ints, start: CacheHandle | None = None) -> InsertResult:
        return InsertResult(0, self._empty)

    def lock_handle(self, handle: CacheHandle, unlock: bool = False) -> None:
        """Does nothing: there is nothing to protect."""

    def move_lock(self, held: CacheHandle, longer: CacheHandle) -> None:
        """Does nothing: there is nothing to protect."""

    def count_hit(self, handle: CacheHandle, start: CacheHandle | None = None) -> None:
        """Does nothing: nothing hits."""

    def summary(self, max_nodes: int) -> list[NodeSummary]:
        return []

    def evict(self, num_tokens: int, partial: bool = True) -> IntArray:
        if num_tokens > 0:
            raise CacheError(f"cannot evict {num_tokens} tokens: the naive cache holds none")
        return np.empty(0, np.int32)

    def forget(self, handle: CacheHandle) -> IntArray:
        return np.empty(0, np.int32)

    @property
    def size_info(self) -> SizeInfo:
        return SizeInfo(evictable_size=0, protected_size=0)

    def page_starts(self) -> IntArray:
        return np.empty(0, np.int32)

    def reset(self) -> None:
        """Does nothing: there is nothing to forget."""

    def check_integrity(self, held: Iterable[CacheHandle] | None = None) -> None:
        for handle in held or ():
            if handle != self._empty:
                raise IntegrityError(f"handle {handle} does not come from this naive cache")
