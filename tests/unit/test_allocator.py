from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import CacheError, IntegrityError, PageAllocator


def test_the_first_pages() -> None:
    """Free slots start as [0, 4, 8, ...] at page size 4, and are handed out in that order."""
    pages = PageAllocator(num_pages=5, page_size=4)
    assert pages.free_page_starts.tolist() == [0, 4, 8, 12, 16]
    starts = pages.allocate(3)
    assert starts.tolist() == [0, 4, 8]
    assert starts.dtype == np.int32
    assert pages.free_pages == 2
    assert pages.allocate(0).tolist() == []


def test_freed_last_is_handed_out_first() -> None:
    pages = PageAllocator(num_pages=4, page_size=1)
    pages.allocate(3)
    pages.free([2, 0])
    assert pages.free_page_starts.tolist() == [0, 2, 3]
    assert pages.allocate(2).tolist() == [0, 2]


def test_what_is_allocated_is_the_callers_own() -> None:
    pages = PageAllocator(num_pages=4, page_size=1)
    pages.allocate(2)[:] = -1
    pages.free([0, 1])
    pages.check_integrity()


def test_too_many() -> None:
    pages = PageAllocator(num_pages=4, page_size=2)
    pages.allocate(1)
    with pytest.raises(CacheError, match="cannot allocate 4 pages: 3 of 4 are free"):
        pages.allocate(4)
    with pytest.raises(CacheError, match="cannot allocate -1 pages"):
        pages.allocate(-1)
    assert pages.free_pages == 3


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([8], "free already"),
        ([0, 4, 0], "slot 0 is given back twice"),
        ([2], "slot 2 is not the first of a page"),
        ([16], "outside the pool of 4 pages"),
        ([-4], "outside the pool of 4 pages"),
    ],
)
def test_pages_that_cannot_be_freed(starts: list[int], message: str) -> None:
    pages = PageAllocator(num_pages=4, page_size=4)
    pages.allocate(2)
    with pytest.raises(CacheError, match=message):
        pages.free(starts)
    assert pages.free_page_starts.tolist() == [8, 12]
    pages.check_integrity()
    pages.free([0, 4])
    pages.check_integrity()
    assert pages.free_pages == 4


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 1), (1, 0), (2**27, 16)])
def test_sizes(num_pages: int, page_size: int) -> None:
    with pytest.raises(CacheError):
        PageAllocator(num_pages, page_size)


def test_reset() -> None:
    pages = PageAllocator(num_pages=3, page_size=2)
    pages.allocate(2)
    pages.reset()
    assert pages.free_page_starts.tolist() == [0, 2, 4]
    pages.check_integrity()


def test_integrity() -> None:
    pages = PageAllocator(num_pages=4, page_size=1)
    pages._stack[0] = 0
    with pytest.raises(IntegrityError, match="disagree"):
        pages.check_integrity()


@given(st.integers(1, 12), st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 12))))
def test_every_page_is_in_one_place(num_pages: int, page_size: int, calls: list[tuple[bool, int]]) -> None:
    pages = PageAllocator(num_pages, page_size)
    mine: list[int] = []
    for take, count in calls:
        if take and count <= pages.free_pages:
            mine += pages.allocate(count).tolist()
        elif not take:
            pages.free(mine[:count])
            mine = mine[count:]
        pages.check_integrity()
        assert sorted(mine + pages.free_page_starts.tolist()) == [page * page_size for page in range(num_pages)]
