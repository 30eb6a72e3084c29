"""`Scheduler`: decides what every step computes, and what the results mean.

One thread owns it. A driver alternates::

    plan = scheduler.schedule()          # None: nothing to plan now, or overlap_depth plans in flight
    ... send plan, receive the result of the oldest plan in flight ...
    outputs = scheduler.process(result)

State advances when a step is planned, not when it returns, so the next plan never waits for a result. What a step
will do to memory is settled (evict, preempt, give up) before its first row is placed (R14), and a row that leaves
early keeps its pages until the last plan that uses it has returned (R7).
"""

from __future__ import annotations

from collections import deque

import numpy as np

from kvcache import PrefixDigest
from scheduler.cache_manager import CacheManager
from scheduler.config import SchedulerConfig
from scheduler.constraint import step_masks
from scheduler.decode import NO_DECODES, DecodeBatch, DecodeEntries
from scheduler.extras import PromptScoreKeeper
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.plan_builder import PlanBuilder
from scheduler.policies import create_policy
from scheduler.prefill import Chunk, PrefillPlanner
from scheduler.request import Req, ReqState, Request, check_request
from scheduler.request_table import RequestTable
from scheduler.results import InFlight, apply_result
from scheduler.row_state import RowState
from scheduler.snapshot import LiveRow, look_at_rows
from scheduler.stats import SchedulerStats
from scheduler.step import StepFormatError, StepPlan, StepResult


class Scheduler:
    """Requests, rows and pages of one engine. `digest`: see `CacheManager`."""

    def __init__(self, config: SchedulerConfig, digest: PrefixDigest | None = None) -> None:
        self.config = config
        self.rows = RowState(
            config.max_running_requests, config.pages_per_row, config.page_size, len(config.eos_token_ids)
        )
        self.cache = CacheManager(config.num_pages, config.page_size, config.cache_type, self.rows, digest)
        self.policy = create_policy(config.policy)
        self.decode = DecodeBatch(self.rows, self.cache)
        self.prefill = PrefillPlanner(self.rows, self.cache, self.policy)
        self._builder = PlanBuilder(config, self.rows)
        self._table = RequestTable(self.rows, self.cache, self.policy, self.decode, self.prefill)
        self._prompt_scores = PromptScoreKeeper()
        self._in_flight: deque[InFlight] = deque()
        self._arrivals = 0
        self._planned = 0  # id of the newest plan
        self._returned = 0  # id of the newest plan whose result was processed

    # ---------------------------------------------------------------- requests in

    def validate(self, request: Request) -> None:
        """Raises InvalidRequest if the request can never be served as it is."""
        check_request(request, self.config)

    def add(self, request: Request) -> None:
        """Put a request in line. Raises InvalidRequest, also for an id that is in use."""
        self.validate(request)
        self._table.add(Req(request, self._arrivals, self.rows, self.config.eos_token_ids))
        self._arrivals += 1

    def abort(self, request_id: int) -> bool:
        """End a request now, wherever it is; its ABORT is in `take_outputs`. False if there is no such request."""
        req = self._table.unfinished.get(request_id)
        if req is None:
            return False
        self._table.withdraw(req, FinishReason.ABORT)
        self._table.give_back_rows(self._returned)
        return True

    def fail_poison(self, request_id: int, reason: str) -> None:
        """End a request with POISON and this message. An unknown id is ignored."""
        req = self._table.unfinished.get(request_id)
        if req is not None:
            self._table.withdraw(req, FinishReason.POISON, reason)
            self._table.give_back_rows(self._returned)

    def abort_all(self, reason: str) -> None:
        """End every request with ERROR and this message. Plans in flight may still be processed."""
        for req in list(self._table.unfinished.values()):
            self._table.withdraw(req, FinishReason.ERROR, reason)
        self._table.give_back_rows(self._returned)

    # ---------------------------------------------------------------- planning

    def schedule(self) -> StepPlan | None:
        """Plan one step; None if there is nothing to plan now or `overlap_depth` plans are in flight.

        The plan's buffer stays as it is until `overlap_depth + 2` more plans were made.
        """
        if len(self._in_flight) >= self.config.overlap_depth:
            return None
        while True:
            self._table.give_back_rows(self._returned)
            if not (self.decode.rows.size or self.prefill.running or len(self.policy)):
                return None
            entries = self._settle_decodes()
            chunks = self.prefill.plan(self.config.max_step_tokens - len(entries.rows), self.decode.rows)
            if len(entries.rows) or chunks:
                return self._seal(entries, chunks)
            if self._in_flight:
                return None
            self._make_progress_possible()

    def _settle_decodes(self) -> DecodeEntries:
        """The decode rows of this step, with the pages they need."""
        if not self.decode.rows.size:
            return NO_DECODES
        rows = self.decode.select(self.config.max_step_tokens)
        cached_len, crossing = self.decode.crossing(rows)
        if len(crossing) > self.cache.free_pages and len(crossing) > self.cache.available_pages:
            rows = self._make_room(rows)
            cached_len, crossing = self.decode.crossing(rows)
        return self.decode.take_pages(rows, cached_len, crossing)

    def _make_room(self, rows: np.ndarray) -> np.ndarray:
        """Preempt until the pages that are free, or on their way back, cover what `rows` need; returns those that can
        run now. The rest wait for a step: pages given up while planning are not handed out again in the same plan."""
        while True:
            needing = rows[self.decode.crossing(rows)[1]]
            short = len(needing) - self.cache.available_pages
            if short <= self._table.returning_pages():
                break
            running = self._table.running()
            if len(running) > 1:
                self._table.preempt(self.policy.victim(running))
            elif not (self._table.leaving or self._in_flight):
                self._give_up(running[0])
            else:  # pages may come back, or a token in flight may end the request: wait
                break
            rows = rows[self.rows.decoding[rows]]
        if short <= 0:
            return rows
        order = sorted(needing.tolist(), key=lambda row: self.policy.preemption_key(self._table.by_row[row]))
        waits = np.zeros(self.rows.num_rows, dtype=bool)
        waits[order[self.cache.available_pages :]] = True
        return rows[~waits[rows]]

    def _give_up(self, req: Req) -> None:
        """This request does not fit in the pool even when it runs alone."""
        config = self.config
        message = (
            f"request {req.request_id} outgrew the KV cache: it has {req.known_len} tokens, the pool holds "
            f"{config.num_pages} pages of {config.page_size} tokens; raise num_pages or lower max_tokens"
        )
        self._table.withdraw(req, FinishReason.INVALID, message)

    def _make_progress_possible(self) -> None:
        """Nothing could be placed and nothing is in flight: preempt a prefill, or see that a request cannot fit."""
        if self._table.leaving or self.cache.quarantined_pages:  # it was given up just now and comes back next
            return
        running = self.prefill.running
        if len(running) > 1:
            self._table.preempt(self.policy.victim(running))
        elif running:
            self._give_up(running[0])
        else:  # one that was preempted or recovered when it had already outgrown the pool
            self._give_up(self.prefill.turned_away)

    def _seal(self, entries: DecodeEntries, chunks: list[Chunk]) -> StepPlan:
        self._planned += 1
        masks, failed = None, []
        if self.rows.constraints:
            masks, failed = step_masks(self.rows, entries.rows, chunks)
        plan, finished = self._builder.build(self._planned, self.decode, entries, chunks, masks)
        unsampled: list[int] = []
        if len(finished):
            for row in finished.tolist():
                self._table.by_row[row].state = ReqState.LAST
            self.decode.remove(finished)
        if chunks:
            starting = []
            for chunk in chunks:
                req = chunk.req
                self._table.by_row[req.table_idx] = req
                if chunk.final:
                    if chunk.end + 1 < req.end_len:
                        req.state = ReqState.DECODE
                        starting.append(req.table_idx)
                    else:
                        req.state = ReqState.LAST
                        if not chunk.samples:
                            unsampled.append(req.table_idx)
            if starting:
                self.decode.add(starting)
        self.rows.last_plan[plan.rows[: plan.num_rows]] = self._planned
        self._in_flight.append(InFlight.of_plan(self._planned, plan, unsampled))
        for row, reason in failed:
            self._table.withdraw(self._table.by_row[row], FinishReason.INVALID, reason)
        return plan

    # ---------------------------------------------------------------- results

    def process(self, result: StepResult) -> StepOutputs:
        """Apply the result of the oldest plan in flight.

        Raises StepFormatError, and changes nothing, if `result` is not that plan's.
        """
        if not self._in_flight:
            raise StepFormatError(f"result of step {result.step_id} arrived, but no step is in flight")
        step = self._in_flight[0]
        if result.step_id != step.step_id or len(result.tokens) != len(step.rows):
            raise StepFormatError(
                f"expected the result of step {step.step_id} with {len(step.rows)} tokens, "
                f"got step {result.step_id} with {len(result.tokens)}"
            )
        self._in_flight.popleft()
        self._returned = step.step_id
        if step.dropped:
            return StepOutputs.of_finished([], step_id=step.step_id)
        scores = self._prompt_scores
        if result.scores is not None or scores.complete:
            scores.record(result.scores, self._table.by_row, self.rows)
        outputs = apply_result(step, result, self.rows, self._table, self.decode)
        if scores.complete:
            scores.deliver(outputs)
        if self.rows.constraints:
            self._table.follow_constraints(step.rows, result.tokens)
        self._table.give_back_rows(self._returned)
        return outputs

    def take_outputs(self) -> StepOutputs:
        """Finishes that came with no result: aborts, and requests that could not run."""
        return self._table.take_outputs()

    def recover(self) -> None:
        """The workers are new: forget plans in flight and all K/V, and put every unfinished request back in its place
        in line with the tokens that have arrived (R12)."""
        self._in_flight.clear()
        self._returned = self._planned
        self._table.recover()

    def flush(self, pages: np.ndarray | None, reason: str) -> list[int]:
        """The pages cannot be trusted: forget all K/V. The workers live, so results of plans in flight still come; they
        are dropped.

        Requests that hold one of `pages` (numbers; None: all that have a row) end with ERROR and this message, the
        others wait again as after `recover`. Returns the ids of those that ended.
        """
        ended = self._table.end_holders(pages, reason)
        self._in_flight = deque(step._replace(dropped=True) for step in self._in_flight)
        self._table.recover()
        return ended

    def run_only(self, request_id: int | None) -> None:
        """Let only this request run; the others, new ones too, wait with what they have. None: all run again.

        Others that were running stop being planned; what is in flight of them still counts.
        """
        self._table.run_only(request_id)

    def known_len(self, request_id: int) -> int | None:
        """Tokens of prompt and output that have arrived; None if there is no such unfinished request."""
        req = self._table.unfinished.get(request_id)
        return None if req is None else req.known_len

    def requests_in_flight(self) -> dict[int, int]:
        """Unfinished requests that plans in flight compute, oldest first, and their known lengths."""
        return {
            req.request_id: req.known_len
            for req in self._table.unfinished.values()
            if req.table_idx >= 0 and self.rows.last_plan[req.table_idx] > self._returned
        }

    def requests_with_row(self) -> list[int]:
        """Ids of the unfinished requests that have a row, oldest first."""
        return [req.request_id for req in self._table.unfinished.values() if req.table_idx >= 0]

    def live_rows(self, with_tokens: bool) -> list[LiveRow]:
        """Copies of all rows as the plans so far leave them, for a snapshot."""
        return look_at_rows(self._table.with_row(), self.rows, with_tokens)

    def known_tokens(self, rows: list[int]) -> dict[int, np.ndarray]:
        """Copies of the tokens that the driver knows of these rows: int32[n] each."""
        return {row: self.rows.tokens[row, : self.rows.known_len[row]].copy() for row in rows}

    # ---------------------------------------------------------------- state

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not been processed."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether any request waits, runs, or has yet to give its row back."""
        return bool(self._table.unfinished or self._table.leaving)

    def stats(self) -> SchedulerStats:
        """Constant cost, but for a count while only one request may run."""
        return SchedulerStats(
            running=self.rows.used_rows,
            waiting=len(self.policy) + self._table.num_held(),
            free_pages=self.cache.free_pages,
            total_pages=self.config.num_pages,
            cached_pages=self.cache.prefix_cache.size_info.total_size // self.config.page_size,
            evictable_pages=self.cache.prefix_cache.size_info.evictable_size // self.config.page_size,
            prefilled_tokens=self.prefill.prefilled_tokens,
            cached_tokens=self.prefill.cached_tokens,
            preemptions=self._table.preemptions,
            steps=self._planned,
            in_flight=len(self._in_flight),
        )

    def check_integrity(self) -> None:
        """R10, and that allocator and tree are sound in themselves: raises IntegrityError. For tests: it walks all."""
        self.cache.check_integrity(self._table.with_row())

    def check_pages(self) -> None:
        """R10: raises IntegrityError unless every page has exactly one owner. Cost grows with the pool."""
        self.cache.check_pages(self._table.with_row())
