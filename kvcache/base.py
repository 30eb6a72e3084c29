"""What a prefix cache is: the interface shared by the radix tree and the naive cache, and its result types.

A prefix cache lives on the driver only. It knows which token sequences have their K/V in the pool and in which
slots; it holds no K/V itself. It is not thread-safe: the scheduler's thread owns it.

Two conventions hold for every method:

* Token ids and slots are one-dimensional int32 numpy arrays, one entry per token. Other integer sequences are
  converted. Only full pages are cached: a tail of ``len(ids) % page_size`` tokens is ignored.
* With ``start`` (a handle of an earlier result) ``ids`` is still the whole sequence from position 0, of which the
  first ``start.cached_len`` tokens are taken on trust and not read, while slot arrays, given or returned, cover only
  positions from ``start.cached_len`` on. Every ``cached_len`` counts from position 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
Ints = NDArray[np.integer] | Sequence[int]


class CacheError(ValueError):
    """A call that a prefix cache or the page allocator refuses; nothing was changed."""


class IntegrityError(RuntimeError):
    """An invariant of a cache or an allocator does not hold: a bug in the engine, never a user's mistake.

    `pages`: all pages (numbers, int64[n]) that it is about; None: that cannot be told.
    """

    def __init__(self, message: str, pages: np.ndarray | None = None) -> None:
        super().__init__(message)
        self.pages = pages


class CacheHandle(NamedTuple):
    """A cached prefix. It protects nothing until it is locked.

    A handle that is not locked goes stale when its prefix is evicted; using it then raises `CacheError`.
    """

    cached_len: int
    """Tokens from position 0 to the end of the prefix; a multiple of the page size."""
    node: Any
    """Where the cache keeps the prefix; opaque to callers."""


class MatchResult(NamedTuple):
    handle: CacheHandle
    indices: IntArray
    """Slots of the matched tokens (from `start` on), int32; the caller owns the array."""


class InsertResult(NamedTuple):
    cached_len: int
    """Tokens, from position 0, that were cached before the call. The caller's slots for them (from `start` on) were
    not taken and stay the caller's; slots of later full pages now belong to the cache."""
    handle: CacheHandle
    """The whole sequence, cut to full pages."""


class SizeInfo(NamedTuple):
    evictable_size: int
    """Tokens that `evict` could free now."""
    protected_size: int
    """Tokens under at least one lock."""

    @property
    def total_size(self) -> int:
        return self.evictable_size + self.protected_size


class NodeSummary(NamedTuple):
    """One cached stretch of tokens, as `BasePrefixCache.summary` shows it."""

    parent: int
    """Index in the summary of the stretch it continues; -1: it begins at position 0."""
    tokens: int
    hits: int
    """Requests that used it instead of computing it."""
    locks: int
    """Running requests that use it now."""
    idle: float
    """Seconds since it was last in use, or was added; 0 while it is in use."""
    children: int
    """Stretches that continue it, shown or not."""


class BasePrefixCache(ABC):
    """Finds and keeps the slots of token prefixes."""

    page_size: int

    @abstractmethod
    def match_prefix(self, ids: Ints, start: CacheHandle | None = None) -> MatchResult:
        """Find the longest cached prefix of `ids` and mark it as just used. It is not locked."""

    @abstractmethod
    def insert_prefix(self, ids: Ints, indices: Ints, start: CacheHandle | None = None) -> InsertResult:
        """Cache `ids`, whose K/V is (or will be, in stream order) in the slots `indices`.

        Raises `CacheError` when the lengths disagree or a new page's slots are not one page in order.
        """

    @abstractmethod
    def insert_pages(self, ids: Ints, page_starts: Ints, start: CacheHandle | None = None) -> InsertResult:
        """`insert_prefix` of whole pages for a caller who has the pages' first slots at hand; these are trusted."""

    @abstractmethod
    def lock_handle(self, handle: CacheHandle, unlock: bool = False) -> None:
        """Protect a prefix from eviction, or with `unlock` take one such protection back. Locks are counted.

        Raises `CacheError` when the handle is stale, or is to be unlocked without being locked.
        """

    @abstractmethod
    def move_lock(self, held: CacheHandle, longer: CacheHandle) -> None:
        """Give up one lock on `held` for one on `longer`, which goes on from it; costs what lies between them.

        Raises `CacheError` when a handle is stale or `held` is not locked.
        """

    @abstractmethod
    def count_hit(self, handle: CacheHandle, start: CacheHandle | None = None) -> None:
        """Note that a request goes on from `handle` instead of computing what lies behind `start` (None: position 0).

        For `summary` alone; `match_prefix` does not count, since a waiting request is matched again and again.
        """

    @abstractmethod
    def summary(self, max_nodes: int) -> list[NodeSummary]:
        """A picture of the cache for people: its `max_nodes` most telling nodes at most, parents before children.

        Costs a bounded number of steps, however large the cache is.
        """

    @abstractmethod
    def evict(self, num_tokens: int, partial: bool = True) -> IntArray:
        """Forget unprotected prefixes, least recently used first; return the freed token slots (whole pages).

        Frees exactly `num_tokens` rounded up to pages. With ``partial=False`` only whole leaves are freed, possibly
        more than asked. Raises `CacheError`, and changes nothing, when `num_tokens` exceeds the evictable size.
        """

    @abstractmethod
    def forget(self, handle: CacheHandle) -> IntArray:
        """Forget this prefix from its end back to what is locked or what another prefix begins with; return the freed
        token slots (whole pages).

        Raises `CacheError` when the handle is stale.
        """

    @property
    @abstractmethod
    def size_info(self) -> SizeInfo:
        """How much is cached, in tokens."""

    @abstractmethod
    def page_starts(self) -> IntArray:
        """First slots of all cached pages, in no particular order. Cost grows with the cache: for checks."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything, locked or not. Handles given out before are stale. No slots are returned."""

    @abstractmethod
    def check_integrity(self, held: Iterable[CacheHandle] | None = None) -> None:
        """Verify every invariant; raise `IntegrityError` naming the first that fails. Cost grows with the cache.

        `held`: all handles that are locked now, once per lock; lock counts are then compared with them as well.
        """


def as_int32(values: Ints) -> IntArray:
    """`values` as a one-dimensional contiguous int32 array, without a copy where it is one already."""
    array = np.ascontiguousarray(values, dtype=np.int32)
    if array.ndim != 1:
        raise CacheError(f"expected a one-dimensional array of token ids or slots, got shape {array.shape}")
    return array


def slot_offsets(num_pages: int, page_size: int) -> IntArray:
    """int32[num_pages * page_size]: each slot's distance from its page's first one, page after page."""
    return np.tile(np.arange(page_size, dtype=np.int32), num_pages)


def page_slots(page_starts: IntArray, page_size: int, offsets: IntArray | None = None) -> IntArray:
    """Token slots of whole pages: page starts [0, 4], page size 4 -> [0, 1, ..., 7].

    `offsets`: `slot_offsets` of at least as many pages, if the caller keeps them; half the time is in making them.
    """
    if page_size == 1:
        return page_starts
    if offsets is None:
        offsets = slot_offsets(len(page_starts), page_size)
    slots = page_starts.repeat(page_size)
    slots += offsets[: len(slots)]
    return slots


def first_slots(slots: IntArray, page_size: int) -> IntArray:
    """The first slot of each page that `slots` name: the opposite of `page_slots`.

    Raises `CacheError` when they are not whole pages, each in order.
    """
    if page_size == 1:
        return slots
    starts = slots[::page_size]
    last = slots[page_size - 1 :: page_size]
    if np.count_nonzero(starts % page_size) or np.count_nonzero(last - starts != page_size - 1):
        raise CacheError(f"slots must come in whole pages of {page_size} that start at multiples of {page_size}")
    return starts
