"""Snapshot plans: what brings fresh workers to where a recording begins.

Every prefix and every live row is one prefill into the slots that it had. A row that decodes also gets the token that
the last step before sampled for it, in the same token run: one token more than the plan computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.extras import ExtraSections
from scheduler.request import Req
from scheduler.row_state import RowState
from scheduler.step import PlanFlags, S, StepPlan, StepPlanWriter, sampling_entry

_GREEDY = sampling_entry(row=0, temperature=0.0, top_p=1.0, min_p=0.0, top_k=0, seed=0, prompt_len=1)


@dataclass(slots=True)
class Prefix:
    """A cached prefix: int32[n] `tokens` of whole pages, and each page's first slot."""

    tokens: np.ndarray
    pages: np.ndarray


class LiveRow:
    """A row as the plans so far leave it.

    req         of it only what never changes is looked at later
    stored      tokens whose K/V is there, or will be by the plans so far
    tokens      int32[stored + 1]; from `known` on not yet sampled when the row was looked at
    pages       int32, first slots of the pages of its first `stored` tokens
    decodes     the next step that runs it takes `tokens[stored]` as its input, without being told
    """

    __slots__ = ("decodes", "known", "pages", "req", "row", "stored", "tokens")

    def __init__(
        self, row: int, req: Req, stored: int, known: int, decodes: bool, tokens: np.ndarray, pages: np.ndarray
    ) -> None:
        self.row = row
        self.req = req
        self.stored = stored
        self.known = known
        self.decodes = decodes
        self.tokens = tokens
        self.pages = pages

    def learn(self, position: int, token: int) -> None:
        """A token that was being sampled has arrived."""
        if position == self.known < len(self.tokens):
            self.tokens[position] = max(token, 0)  # as workers store what is no token
            self.known += 1


def look_at_rows(reqs: Sequence[Req], rows: RowState, with_tokens: bool) -> list[LiveRow]:
    """The rows of `reqs`, with zeros instead of tokens if they are not wanted. About a microsecond a row."""
    numbers = np.array([req.table_idx for req in reqs], dtype=np.int64)
    stored = rows.cached_len[numbers]
    known = np.minimum(rows.known_len[numbers], stored + 1) if with_tokens else stored + 1
    num_pages = -(-stored // rows.page_size)
    tokens, pages = rows.tokens, rows.page_table
    columns = (numbers.tolist(), reqs, stored.tolist(), known.tolist(), rows.decoding[numbers].tolist())
    return [
        LiveRow(
            row, req, count, there, decodes,
            tokens[row, : count + 1].copy() if with_tokens else np.zeros(count + 1, dtype=np.int32),
            pages[row, :held].copy(),
        )
        for row, req, count, there, decodes, held in zip(*columns, num_pages.tolist(), strict=True)
    ]  # fmt: skip


def snapshot_plans(
    step_id: int, prefixes: Sequence[Prefix], rows: Sequence[LiveRow], page_size: int, max_step_tokens: int
) -> list[StepPlan]:
    """Plans, all of step `step_id`, that store each prefix and each row's tokens in their slots and admit the rows.

    None computes more than `max_step_tokens` tokens or samples one. A page that several share is computed once.

    Raises:
        ValueError: a row waits for a token that never arrived.
    """
    builder = _Builder(step_id, page_size, max_step_tokens)
    plans: list[StepPlan] = []
    for prefix in prefixes:
        plans += builder.sequence(prefix.tokens, len(prefix.tokens), prefix.pages, None)
    for row in rows:
        if row.decodes and row.known <= row.stored:
            raise ValueError(f"row {row.row} waits for its token at position {row.known}, which never arrived")
        # What nobody knows yet of a row that is on its way out, nobody will read.
        stored = min(row.stored, row.known)
        if stored:
            end = stored + 1 if row.decodes else stored
            plans += builder.sequence(row.tokens[:end], stored, row.pages, row)
    return plans


class _Builder:
    def __init__(self, step_id: int, page_size: int, max_step_tokens: int) -> None:
        self._step_id = step_id
        self._size = page_size
        self._budget = max_step_tokens
        self._stored: set[int] = set()  # first slots of the pages that plans so far fill

    def sequence(self, tokens: np.ndarray, stored: int, pages: np.ndarray, row: LiveRow | None) -> Iterator[StepPlan]:
        """Compute the first `stored` tokens into `pages`, or what is not there of them."""
        size = self._size
        there = next((i for i, page in enumerate(pages.tolist()) if page not in self._stored), len(pages))
        start = min(there * size, stored - 1)
        self._stored.update(pages[: stored // size].tolist())
        news = pages[: -(-stored // size)]
        while start < stored:
            end = min(start + self._budget, stored)
            yield self._chunk(tokens[start : len(tokens) if end == stored else end], start, end, pages, news, row)
            start, news = end, pages[:0]

    def _chunk(
        self, tokens: np.ndarray, start: int, end: int, pages: np.ndarray, news: np.ndarray, row: LiveRow | None
    ) -> StepPlan:
        """Positions start .. end. With `news`, all pages of its row, it admits the row."""
        number, first, size = 0 if row is None else row.row, len(news) > 0, self._size
        stop_ids = row.req.stop_ids if first and row is not None and row.req.suppress_until else ()
        extras = None
        if first and row is not None:
            extras = ExtraSections.of_row(number, row.req.request, row.tokens[: min(row.known, len(row.tokens))])
        plan = StepPlanWriter(1).begin(
            step_id=self._step_id, num_rows=1, num_decode=0, num_samples=0, num_tokens=end - start,
            page_deltas=len(news), token_runs=1, run_tokens=len(tokens), sampling=int(first),
            suppress_runs=int(bool(stop_ids)), suppress_ids=len(stop_ids), flags=PlanFlags.SNAPSHOT,
            extras=extras.counts if extras is not None and extras.counts.words else None,
        )  # fmt: skip
        plan.rows[0], plan.cached_len[0], plan.device_len[0], plan.sample[0] = number, start, end, 0
        positions = np.arange(start, end)
        plan.out_loc[:] = pages[positions // size] + positions % size
        plan.token_runs[0] = number, start, len(tokens)
        plan.run_tokens[:] = tokens
        if first:
            plan.page_deltas[:, 0] = number
            plan.page_deltas[:, 1] = np.arange(len(news)) * size
            plan.page_deltas[:, 2] = news
            plan.sampling[0] = np.frombuffer(_GREEDY if row is None else row.req.sampling_words, dtype="<i4")
            plan.sampling[0, S.ROW] = number
        if stop_ids:
            plan.suppress_runs[0] = number, row.req.suppress_until, len(stop_ids)
            plan.suppress_ids[:] = stop_ids
        if plan.extras is not None:
            extras.write(plan.extras)
        return plan.seal()


def missing_prefixes(
    rows: Iterable[LiveRow], steps: Iterable[tuple[StepPlan, dict[int, np.ndarray]]], page_size: int
) -> list[Prefix]:
    """The cached prefixes that `steps` read and neither store themselves nor find in `rows`: what the tree held when
    they began, as far as anybody needed it.

    `steps`: each plan with the known tokens (int32[n]) of the rows that it admits, by row; zeros where they are left
    out.
    """
    tables = {row.row: dict(enumerate(row.pages.tolist())) for row in rows}
    known = {row.row: row.tokens for row in rows}
    stored = {page for table in tables.values() for page in table.values()}
    prefixes: list[Prefix] = []
    for plan, prompts in steps:
        for row in plan.sampling[:, S.ROW].tolist():
            tables[row] = {}
        known.update(prompts)
        for row, position, page in plan.page_deltas.tolist():
            tables[row][position // page_size] = page
        stored.update(np.unique(plan.out_loc[: plan.num_tokens] // page_size * page_size).tolist())
        for entry in range(plan.num_decode, plan.num_rows):
            row, whole = int(plan.rows[entry]), int(plan.cached_len[entry]) // page_size
            pages = [tables[row][index] for index in range(whole)]
            last = next((i for i in range(whole - 1, -1, -1) if pages[i] not in stored), -1)
            if last >= 0:
                end = (last + 1) * page_size
                tokens = known.get(row, np.zeros(0, dtype=np.int32))[:end]
                if len(tokens) < end:
                    tokens = np.zeros(end, dtype=np.int32)
                prefixes.append(Prefix(tokens, np.array(pages[: last + 1], dtype=np.int32)))
                stored.update(pages[: last + 1])
    return prefixes
