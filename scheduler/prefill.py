"""Prefill: which prompts get how much of a step's budget.

A step's chunks are chosen one after the other, each with its pages in hand and its full pages in the tree before the
next is looked at, so a twin in the same step finds them. At most one prompt is cut by the budget, and it takes what is
left of it: to the last page border inside (or all of it, when the budget is less than a page). What then remains is
less than a page and only serves a request whose whole rest fits in, so no request ever starts on a page that another
one is in the middle of.
"""

from __future__ import annotations

import time

import numpy as np

from scheduler.cache_manager import CacheManager
from scheduler.policies import Policy
from scheduler.request import Req, ReqState
from scheduler.row_state import RowState

LOOKAHEAD = 512  # tokens of further output for which a running request may claim pages at admission
GROWTH_FIRST, GROWTH_LEAST, GROWTH_DECAY = 0.3, 0.05, 0.998  # share of LOOKAHEAD that is claimed


class Chunk:
    """Input positions `start .. end` of one row in the step being planned."""

    __slots__ = ("end", "final", "first", "page_from", "page_to", "req", "start")

    def __init__(self, req: Req, start: int, end: int, final: bool, first: bool, page_from: int, page_to: int) -> None:
        self.req = req
        self.start = start
        self.end = end
        self.final = final  # reaches the end of the known tokens
        self.first = first  # the row was given out in this step
        self.page_from = page_from  # pages page_from .. page_to of the row are news to the workers
        self.page_to = page_to

    @property
    def samples(self) -> bool:
        """Whether a token is sampled after it."""
        return self.final and self.end < self.req.end_len


class PrefillPlanner:
    """Keeps the rows whose prompt is not yet planned to its end, and admits waiting requests."""

    def __init__(self, rows: RowState, cache: CacheManager, policy: Policy) -> None:
        self._rows = rows
        self._cache = cache
        self._policy = policy
        self.running: list[Req] = []  # in prefill, in the order of admission
        self.prefilled_tokens = 0
        self.cached_tokens = 0
        self._growth = GROWTH_FIRST
        self._claimed = 0  # pages that running rows will want, for this step's admissions
        self._up_to_date: tuple[Req, int] | None = None  # row that has all the tree has, as of so many insertions
        self._blocked: tuple[Req, int, int] | None = None  # head that found no room; available pages, insertions then

    def plan(self, budget: int, decode_rows: np.ndarray) -> list[Chunk]:
        """This step's chunks within `budget` tokens: their pages are allocated, their full pages in the tree.

        `decode_rows` are all running decodes, for the estimate of what they will still want.
        """
        chunks: list[Chunk] = []
        self._growth = max(GROWTH_LEAST, self._growth * GROWTH_DECAY)
        self._claimed = -1
        going_on = sorted(self.running, key=self._policy.preemption_key)
        whole_only, admitting = False, True
        while budget > 0:
            head = self._head() if admitting else None
            if going_on and not (head is not None and self._policy.precedes(head, going_on[0])):
                chunk = self._go_on(going_on.pop(0), budget, whole_only)
            elif head is not None:
                chunk = self._admit(head, budget, whole_only, decode_rows)
                if chunk is None:  # no room for it, but prefills under way go on
                    admitting = False
                    continue
            else:
                break
            if chunk is None:
                break
            self._place(chunk)
            chunks.append(chunk)
            budget -= chunk.end - chunk.start
            if not chunk.final:
                whole_only = True
                budget = min(budget, self._cache.page_size - 1)  # cut for want of pages: as if it had taken it all
        return chunks

    @property
    def turned_away(self) -> Req:
        """The waiting request that found no room."""
        assert self._blocked is not None
        return self._blocked[0]

    def preempted(self) -> None:
        """Pages ran out: be more careful at admission for a while."""
        self._growth = min(1.0, max(GROWTH_FIRST, 2 * self._growth))

    def line_changed(self) -> None:
        """Somebody joined or left the line: who found no room before may not be first now."""
        self._blocked = None

    def _head(self) -> Req | None:
        """The next request to admit; None if there is none, or nothing changed since the first found no room."""
        if not len(self._policy) or not self._rows.free_rows:
            return None
        if self._blocked is not None and self._rows.used_rows:
            _, available, insertions = self._blocked
            if insertions == self._cache.insertions and available >= self._cache.available_pages:
                return None
        self._blocked = None
        return self._policy.head(self.cached_prefix)

    def cached_prefix(self, req: Req) -> int:
        """Tokens of a waiting request that are in the prefix cache."""
        return self._cache.match_req(req).handle.cached_len

    def _go_on(self, req: Req, budget: int, whole_only: bool) -> Chunk | None:
        """The next chunk of a row in prefill; None if it has to wait."""
        if not req.private and self._up_to_date != (req, self._cache.insertions):
            match = self._cache.match_req(req)
            if match.handle.cached_len > req.cached_len:  # another row was faster
                self._cache.lock(match.handle)
                self.cached_tokens += self._cache.adopt(req, match)
        start, known = req.cached_len, req.known_len
        if whole_only and known - start > budget:
            return None
        return self._cut(req, start, known, budget, self._cache.available_pages, first=False)

    def _admit(self, req: Req, budget: int, whole_only: bool, decode_rows: np.ndarray) -> Chunk | None:
        """Give `req` a row and its first chunk; None if budget or memory do not allow it yet."""
        rows, cache, size = self._rows, self._cache, self._cache.page_size
        known = len(req.ids)
        match = cache.match_req(req)
        matched = match.handle.cached_len
        if whole_only and known - matched > budget:
            return None
        if self._claimed < 0:
            self._claimed = self._claims(decode_rows)
        own = int(min(req.end_len - known, LOOKAHEAD) * self._growth) // size
        need = -(-known // size) - matched // size
        claimed = own + self._claimed if rows.used_rows else 0
        available = cache.available_pages
        if need + claimed > available:
            return self._block(req, available)
        cache.lock(match.handle)
        if matched:  # R2: locking the match took it out of what can be evicted, so look again
            available = cache.available_pages
            if need + claimed > available:
                cache.unlock(match.handle)
                return self._block(req, cache.available_pages)
        self._policy.admitted(req)
        self._policy.remove(req)
        self._take_row(req)
        if matched:
            self.cached_tokens += cache.adopt(req, match)
        else:
            req.handle = match.handle
        if req.cached_prompt < 0:
            req.cached_prompt = min(matched, req.prompt_len)
            req.request.admitted_at = time.monotonic()
        rows.cached_prompt[req.table_idx] = req.cached_prompt
        self.running.append(req)
        chunk = self._cut(req, matched, known, budget, available, first=True)
        self._claimed += own + -(-known // size) - chunk.page_to
        return chunk

    def _block(self, req: Req, available: int) -> None:
        self._blocked = (req, available, self._cache.insertions)

    def _claims(self, decode_rows: np.ndarray) -> int:
        """Pages that running rows will want: the rest of their prompts, and an estimate of their outputs."""
        rows, size = self._rows, self._cache.page_size
        if not rows.used_rows:
            return 0
        prefills = np.array([req.table_idx for req in self.running], dtype=np.int64)
        claimed = 0
        if len(prefills):
            missing = -(-rows.known_len[prefills] // size) + (-rows.cached_len[prefills] // size)
            claimed = int(missing.sum())
        running = np.concatenate([decode_rows, prefills])
        growth = np.minimum(rows.end_len[running] - np.maximum(rows.cached_len, rows.known_len)[running], LOOKAHEAD)
        return claimed + int(growth.sum() * self._growth) // size

    def _take_row(self, req: Req) -> None:
        rows, row, known = self._rows, self._rows.acquire(), len(req.ids)
        rows.tokens[row, :known] = req.ids
        rows.known_len[row] = known
        rows.cached_len[row] = 0
        rows.device_len[row] = known
        rows.request_id[row] = req.request_id
        rows.end_len[row] = req.end_len
        rows.stop_from[row] = req.stop_from
        rows.set_stop_ids(row, req.stop_ids)
        rows.last_plan[row] = 0
        rows.accepts[row] = True
        if req.request.constraint is not None:
            rows.set_constraint(row, req.request.constraint)
        req.table_idx = row
        req.ids = None
        req.private = req.has_extras and req.to_score
        req.sent_pages = 0
        req.state = ReqState.PREFILL

    def _cut(self, req: Req, start: int, known: int, budget: int, available: int, first: bool) -> Chunk | None:
        """How far the row gets from `start` with `budget` tokens and `available` pages; None: nowhere."""
        size = self._cache.page_size
        end = start + budget
        if end >= known:
            end = known
        elif budget >= size:
            end -= end % size
        reach = (-(-start // size) + available) * size
        if end > reach:
            end = reach
            if end <= start:
                return None
        return Chunk(req, start, end, end == known, first, req.sent_pages, -(-end // size))

    def _place(self, chunk: Chunk) -> None:
        """Take the chunk's pages and advance the row past it."""
        rows, req = self._rows, chunk.req
        row, size = req.table_idx, self._cache.page_size
        held = -(-chunk.start // size)
        if chunk.page_to > held:
            rows.page_table[row, held : chunk.page_to] = self._cache.allocate_paged(chunk.page_to - held)
        rows.cached_len[row] = chunk.end
        if not req.private:
            self._cache.cache_req(req)
        req.sent_pages = chunk.page_to
        self.prefilled_tokens += chunk.end - chunk.start
        if chunk.final:
            self.running.remove(req)
            rows.device_len[row] = chunk.end + 1
            rows.next_slot[row] = rows.slot(row, chunk.end - 1) + 1
        else:
            self._up_to_date = (req, self._cache.insertions)
