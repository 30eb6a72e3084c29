"""Where pages change hands: free list, prefix cache, rows, quarantine.

::

    allocate_paged          cache_req (planned prefill)        cache_req(finished=True)
    free ------------> row's private pages ------------> tree <---- full pages of known tokens
      ^                      |        |                    |
      |                      |        +-- duplicates, tail -----> free (the row's last plan has returned)
      |                      +-- adopt: a twin was faster ------> quarantine --> free
      +------------------------------- evict --------------------+

A row's first `handle.cached_len` tokens lie in pages of the tree, locked by the handle; all its later pages are its
own. A page that a planned step may still use is never freed: finished rows are given back after their last plan has
returned, and single pages wait in the quarantine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from kvcache import CacheHandle, IntegrityError, MatchResult, PageAllocator, PrefixDigest, create_prefix_cache
from scheduler.request import Req
from scheduler.row_state import RowState


class CacheManager:
    """Pages of one pool. `rows` holds the page table; `cache_type` is a name that `create_prefix_cache` knows.

    `digest`, if given, is kept up to date with what the prefix cache holds.
    """

    def __init__(
        self, num_pages: int, page_size: int, cache_type: str, rows: RowState, digest: PrefixDigest | None = None
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.rows = rows
        self.prefix_cache = create_prefix_cache(cache_type, page_size, digest)
        self.allocator = PageAllocator(num_pages, page_size)
        self.insertions = 0  # grows whenever something enters the tree
        self._quarantine: deque[tuple[int, np.ndarray]] = deque()  # (last plan that uses them, page starts)

    @property
    def free_pages(self) -> int:
        return self.allocator.free_pages

    @property
    def available_pages(self) -> int:
        """Pages that `allocate_paged` can hand out: free or evictable."""
        return self.allocator.free_pages + self.prefix_cache.size_info[0] // self.page_size

    @property
    def available_size(self) -> int:
        """`available_pages` in tokens."""
        return self.available_pages * self.page_size

    @property
    def free_slots(self) -> np.ndarray:
        """First slots of the free pages, next to be handed out first (a copy)."""
        return self.allocator.free_page_starts

    @property
    def quarantined_pages(self) -> int:
        return sum(len(pages) for _, pages in self._quarantine)

    def match_req(self, req: Req) -> MatchResult:
        """Longest cached prefix of the request's known tokens that it may share (R1; none of a prompt to score).

        Goes on from the request's handle, if it holds one. Nothing is locked yet.
        """
        return self.prefix_cache.match_prefix(req.sharable_ids, req.handle)

    def lock(self, handle: CacheHandle) -> None:
        """Protect a prefix; the empty one needs no protection."""
        if handle.cached_len:
            self.prefix_cache.lock_handle(handle)

    def unlock(self, handle: CacheHandle) -> None:
        if handle.cached_len:
            self.prefix_cache.lock_handle(handle, unlock=True)

    def allocate_paged(self, num_pages: int) -> np.ndarray:
        """int32[num_pages]: first slots of pages, evicting what is missing. Needs `num_pages <= available_pages`."""
        missing = num_pages - self.allocator.free_pages
        if missing > 0:
            self.allocator.free(self.prefix_cache.evict(missing * self.page_size)[:: self.page_size])
        return self.allocator.allocate(num_pages)

    def adopt(self, req: Req, match: MatchResult) -> int:
        """Let a row go on from a longer cached prefix; returns the tokens gained.

        `match` must be locked, which is the row's lock from now on, and reach beyond `cached_len` or the row be new.
        Its own partial page, if a chunk ended inside one, is replaced by the tree's and waits in quarantine for the
        row's last plan.
        """
        rows, row, size = self.rows, req.table_idx, self.page_size
        old, new = req.handle, match.handle
        self.prefix_cache.count_hit(new, old)
        first = 0
        if old is not None:
            self.unlock(old)
            first = old.cached_len // size
        last, held = new.cached_len // size, rows.num_pages(row)
        if held > first:
            self.quarantine(rows.page_table[row, first:held].copy(), int(rows.last_plan[row]))
        rows.page_table[row, first:last] = match.indices[::size]
        gained = new.cached_len - int(rows.cached_len[row])
        rows.cached_len[row] = new.cached_len
        req.handle = new
        req.sent_pages = min(req.sent_pages, first)
        return gained

    def cache_req(self, req: Req, finished: bool = False) -> None:
        """Bring a row's full pages into the tree.

        Planned prefill (`finished=False`): everything up to `cached_len`; the lock moves to the longer prefix.
        `finished=True`: whatever is both stored and known enters the tree, the lock is dropped, and every page that
        the tree did not take (a twin was there first, or the page is not full) is freed. Of a spoilt request nothing
        enters, and what nobody else uses leaves. No planned step may still use the row.
        """
        rows, row, size, held = self.rows, req.table_idx, self.page_size, req.handle
        stored = int(rows.cached_len[row])
        if not finished:
            self._cache_planned(req, held, stored - stored % size)
            return
        num_pages = rows.num_pages(row)
        stored = held.cached_len if req.spoilt else min(stored, int(rows.known_len[row]))
        start, end = held.cached_len, stored - stored % size
        kept_from = kept_to = start
        if end > start:
            pages = rows.page_table[row, start // size : end // size]
            inserted = self.prefix_cache.insert_pages(rows.tokens[row, :end], pages, held)
            kept_from, kept_to = max(start, inserted.cached_len), inserted.handle.cached_len
            self.insertions += 1
        self.unlock(held)
        req.handle = None
        first, duplicates, taken = start // size, kept_from // size, max(kept_from, kept_to) // size
        for begin, end in ((first, duplicates), (taken, num_pages)):
            if end > begin:
                self.allocator.free(rows.page_table[row, begin:end])
        if req.spoilt:
            self.allocator.free(self.prefix_cache.forget(held)[::size])
        rows.cached_len[row] = 0

    def _cache_planned(self, req: Req, held: CacheHandle, end: int) -> None:
        if end <= held.cached_len:
            return
        row, size = req.table_idx, self.page_size
        pages = self.rows.page_table[row, held.cached_len // size : end // size]
        inserted = self.prefix_cache.insert_pages(self.rows.tokens[row, :end], pages, held)
        self.insertions += 1
        # A twin may have inserted the prompt's last page, which no match covers (R1): the row keeps its own copy,
        # which is freed as a duplicate when it finishes (R3).
        if inserted.cached_len <= held.cached_len < inserted.handle.cached_len:
            if held.cached_len:
                self.prefix_cache.move_lock(held, inserted.handle)
            else:
                self.lock(inserted.handle)
            req.handle = inserted.handle
        else:
            assert inserted.handle.cached_len <= max(inserted.cached_len, held.cached_len), "a page half owned"

    def quarantine(self, page_starts: np.ndarray, last_plan: int) -> None:
        """Free pages once plan `last_plan` has returned, and not while a plan is being made (R14)."""
        self._quarantine.append((last_plan, page_starts))

    def release_quarantine(self, returned_plan: int) -> None:
        """Free what only plans up to `returned_plan` use. Call between plans."""
        for _ in range(len(self._quarantine)):
            last_plan, pages = self._quarantine.popleft()
            if last_plan <= returned_plan:
                self.allocator.free(pages)
            else:
                self._quarantine.append((last_plan, pages))

    def reset(self) -> None:
        """Forget every page's owner: the workers are new."""
        self.prefix_cache.reset()
        self.allocator.reset()
        self._quarantine.clear()

    def check_integrity(self, reqs: Iterable[Req]) -> None:
        """`check_pages`, and that allocator and tree are sound in themselves: a walk over all nodes."""
        reqs = list(reqs)
        self.allocator.check_integrity()
        self.prefix_cache.check_integrity([req.handle for req in reqs if req.handle.cached_len])
        self.check_pages(reqs)

    def check_pages(self, reqs: Iterable[Req]) -> None:
        """R10: every page is in exactly one place, and rows point at the tree's pages where they share.

        `reqs`: all requests that have a row. Raises IntegrityError, which names every page at fault.
        """
        rows, size = self.rows, self.page_size
        owners = {"the free list": self.free_slots, "the tree": self.prefix_cache.page_starts()}
        owners |= {f"the quarantine ({i})": pages for i, (_, pages) in enumerate(self._quarantine)}
        wrong, what = [], ""
        for req in reqs:
            row, shared = req.table_idx, req.handle.cached_len
            pages = rows.page_table[row, : rows.num_pages(row)]
            owners[f"row {row} (request {req.request_id})"] = pages[shared // size :]
            if shared:
                match = self.prefix_cache.match_prefix(rows.tokens[row, :shared])  # a locked path: no trace is left
                if match.handle.cached_len != shared or (match.indices[::size] != pages[: shared // size]).any():
                    what = what or f"row {row} and the tree disagree on the pages of its first {shared} tokens"
                    wrong += [pages[: shared // size], match.indices[::size]]
        try:
            counts = np.bincount(np.concatenate(list(owners.values())) // size, minlength=self.num_pages)
        except ValueError as error:
            raise IntegrityError(f"a page before the first one is named: {error}") from error
        if len(counts) > self.num_pages:
            raise IntegrityError(f"page {len(counts) - 1} is named, beyond the pool of {self.num_pages}")
        if (counts != 1).any():
            page = int(np.flatnonzero(counts != 1)[0])
            places = [name for name, starts in owners.items() for start in starts if start // size == page]
            what = what or f"page {page} must be in one place, it is in {' and '.join(places) or 'none'}"
            wrong.append(np.flatnonzero(counts != 1) * size)
        if wrong:
            raise IntegrityError(what, np.unique(np.concatenate(wrong) // size).astype(np.int64))
