"""Which pages of the pool are free."""

from __future__ import annotations

import numpy as np

from kvcache.base import CacheError, IntArray, IntegrityError, Ints, as_int32


class PageAllocator:
    """Free pages as a stack in one int32 array; pages are named by their first slot (page * page_size).

    Pages freed last are handed out first; a fresh allocator hands out 0, page_size, 2 * page_size, ... The order
    depends on nothing but the calls made. Freeing a page twice is an error, in one call or in two.

    A page is free if its place lies in the stack and names it (a sparse set), so taking pages writes nothing.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise CacheError(f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}")
        if num_pages * page_size > np.iinfo(np.int32).max:
            raise CacheError(
                f"{num_pages} pages of {page_size} slots exceed the 2^31 - 1 slots that int32 can name; "
                f"use at most {np.iinfo(np.int32).max // page_size} pages"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.reset()

    def reset(self) -> None:
        """Make every page free, in the order of a fresh allocator."""
        self._stack = np.arange(self.num_pages - 1, -1, -1, dtype=np.int32) * np.int32(self.page_size)
        self._position = np.arange(self.num_pages - 1, -1, -1, dtype=np.int32)  # by page: its last place in the stack
        self._free = self.num_pages

    @property
    def free_pages(self) -> int:
        """How many pages are free."""
        return self._free

    @property
    def free_page_starts(self) -> IntArray:
        """First slots of all free pages, next to be handed out first (a copy)."""
        return self._stack[: self._free][::-1].copy()

    def allocate(self, n_pages: int) -> IntArray:
        """Take `n_pages` pages; returns their first slots, int32. Raises `CacheError` when fewer are free."""
        left = self._free - n_pages
        if n_pages < 0 or left < 0:
            raise CacheError(f"cannot allocate {n_pages} pages: {self._free} of {self.num_pages} are free")
        starts = self._stack[left : self._free][::-1].copy()
        self._free = left
        return starts

    def free(self, page_starts: Ints) -> None:
        """Give pages back, named by their first slots. Raises `CacheError`, changing nothing, if one is not in use."""
        starts = as_int32(page_starts)
        # Unsigned, so that a negative slot is out of range. count_nonzero is several times cheaper here than any().
        pages = starts.view(np.uint32) // np.uint32(self.page_size)
        try:
            places = self._position[pages]
        except IndexError:
            raise CacheError(
                f"slots {starts.min()}..{starts.max()} reach outside the pool of {self.num_pages} pages"
            ) from None
        refused = (places < self._free) & (self._stack[places] == starts) | (pages * self.page_size != starts)
        if np.count_nonzero(refused):
            start = int(starts[refused][0])
            if start % self.page_size:
                raise CacheError(f"slot {start} is not the first of a page of {self.page_size}")
            raise CacheError(f"the page at slot {start} is free already")
        top = self._free + starts.size
        places = np.arange(self._free, top, dtype=np.int32)
        self._position[pages] = places
        # A page given twice keeps only its last place, so reading back shows it.
        twice = self._position[pages] != places
        if np.count_nonzero(twice):
            self._position[pages] = 0
            raise CacheError(f"the page at slot {starts[twice][0]} is given back twice in one call")
        self._stack[self._free : top] = starts
        self._free = top

    def check_integrity(self) -> None:
        """Verify that stack and positions agree; raises `IntegrityError`."""
        pages = self._stack[: self._free] // self.page_size
        if not np.array_equal(self._position[pages], np.arange(self._free)):
            raise IntegrityError("the stack of free pages and the pages' places in it disagree")
