"""Running decodes: one token per row and step, with a fixed number of numpy calls whatever their number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.cache_manager import CacheManager
from scheduler.row_state import RowState

NO_PAGES = np.empty(0, dtype=np.int32)


class DecodeEntries:
    """The decode part of one plan."""

    __slots__ = ("cached_len", "crossing", "pages", "rows")

    def __init__(self, rows: np.ndarray, cached_len: np.ndarray, crossing: np.ndarray, pages: np.ndarray) -> None:
        self.rows = rows  # int64[n]
        self.cached_len = cached_len  # int32[n]
        self.crossing = crossing  # entries that begin a new page
        self.pages = pages  # int32, first slots of those pages


NO_DECODES = DecodeEntries(np.empty(0, dtype=np.int64), NO_PAGES, np.empty(0, dtype=np.int64), NO_PAGES)


class DecodeBatch:
    """Rows that decode, in the order in which they began to."""

    def __init__(self, rows: RowState, cache: CacheManager) -> None:
        self._state = rows
        self._cache = cache
        self._turn = 0
        self.rows = np.empty(0, dtype=np.int64)

    def add(self, rows: Sequence[int]) -> None:
        self._state.decoding[rows] = True
        self.rows = np.concatenate([self.rows, np.array(rows, dtype=np.int64)])

    def remove(self, rows: Sequence[int] | np.ndarray) -> None:
        """Take out rows; those that are not in are ignored."""
        self._state.decoding[rows] = False
        self.rows = self.rows[self._state.decoding[self.rows]]

    def clear(self) -> None:
        self._state.decoding[:] = False
        self.rows = self.rows[:0]

    def select(self, budget: int) -> np.ndarray:
        """All rows that can run now, or when they are more than `budget` the next so many in turn."""
        rows = self.rows
        if self._state.constraints:  # of these the last token must be known, since it decides what may come next
            state = self._state
            rows = rows[~state.constrained[rows] | (state.known_len[rows] > state.cached_len[rows])]
        if len(rows) <= budget:
            return rows
        chosen = np.take(rows, np.arange(self._turn, self._turn + budget), mode="wrap")
        self._turn = (self._turn + budget) % len(rows)
        return chosen

    def crossing(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(cached_len of `rows`, entries whose next token begins a new page)."""
        cached_len = self._state.cached_len[rows]
        size = self._state.page_size
        offset = cached_len & (size - 1) if size & (size - 1) == 0 else cached_len % size
        return cached_len, np.flatnonzero(offset == 0)

    def take_pages(self, rows: np.ndarray, cached_len: np.ndarray, crossing: np.ndarray) -> DecodeEntries:
        """Give the crossing entries their pages, which must be available."""
        pages = NO_PAGES
        if len(crossing):
            pages = self._cache.allocate_paged(len(crossing))
            state, at = self._state, rows[crossing]
            state.next_slot[at] = pages
            state.flat_pages[state.page_base[at] + cached_len[crossing] // state.page_size] = pages
        return DecodeEntries(rows, cached_len, crossing, pages)

    def advance(self, entries: DecodeEntries, out_loc: np.ndarray, device_len: np.ndarray) -> np.ndarray:
        """Move the rows one token on, filling `out_loc` and `device_len`; returns the rows whose last token this is."""
        state, rows = self._state, entries.rows
        slots = state.next_slot[rows]
        out_loc[:] = slots
        slots += 1
        state.next_slot[rows] = slots
        lengths = entries.cached_len + 1
        device_len[:] = lengths
        state.cached_len[rows] = lengths
        lengths += 1
        state.device_len[rows] = lengths
        last = lengths >= state.end_len[rows]
        return rows[last] if last.any() else rows[:0]
