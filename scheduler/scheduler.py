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
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scheduler.cache_manager import CacheManager
from scheduler.config import SchedulerConfig
from scheduler.decode import NO_DECODES, DecodeBatch, DecodeEntries
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.plan_builder import PlanBuilder
from scheduler.policies import create_policy
from scheduler.prefill import Chunk, PrefillPlanner
from scheduler.request import InvalidRequest, Req, ReqState, Request, check_request
from scheduler.row_state import RowState
from scheduler.step import StepFormatError, StepPlan, StepResult


@dataclass(frozen=True)
class SchedulerStats:
    """A snapshot of load, memory and totals since the start. Pages unless they say tokens."""

    running: int
    waiting: int
    free_pages: int
    total_pages: int
    cached_pages: int
    prefilled_tokens: int  # input tokens computed in prefill
    cached_tokens: int  # input tokens served from the prefix cache instead
    preemptions: int
    steps: int
    in_flight: int


class InFlight(NamedTuple):
    """What is needed to apply a plan's result."""

    step_id: int
    rows: np.ndarray  # rows sampled, in the order of the result's tokens
    positions: np.ndarray  # the sampled tokens' positions
    unsampled: list[int]  # rows that end with this step without a token (max_tokens 0)


class Scheduler:
    """Requests, rows and pages of one engine."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.rows = RowState(
            config.max_running_requests, config.pages_per_row, config.page_size, len(config.eos_token_ids)
        )
        self.cache = CacheManager(config.num_pages, config.page_size, config.cache_type, self.rows)
        self.policy = create_policy(config.policy)
        self.decode = DecodeBatch(self.rows, self.cache)
        self.prefill = PrefillPlanner(self.rows, self.cache, self.policy)
        self._builder = PlanBuilder(config, self.rows)
        self._requests: dict[int, Req] = {}  # unfinished, in order of arrival
        self._by_row: list[Req | None] = [None] * config.max_running_requests
        self._leaving: list[Req] = []  # rows to be given back when their last plan has returned
        self._in_flight: deque[InFlight] = deque()
        self._ended: list[tuple[int, FinishReason, int]] = []  # finishes that came with no result
        self._errors: dict[int, str] = {}
        self._arrivals = 0
        self._planned = 0  # id of the newest plan
        self._returned = 0  # id of the newest plan whose result was processed
        self._preemptions = 0

    # ---------------------------------------------------------------- requests in

    def validate(self, request: Request) -> None:
        """Raises InvalidRequest if the request can never be served as it is."""
        check_request(request, self.config)

    def add(self, request: Request) -> None:
        """Put a request in line. Raises InvalidRequest, also for an id that is in use."""
        self.validate(request)
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id} is in use by an unfinished request")
        req = Req(request, self._arrivals, self.rows, self.config.eos_token_ids)
        self._arrivals += 1
        self._requests[request.request_id] = req
        reason = req.finish_before_start()
        if reason is FinishReason.NONE:
            self._line_up(req)
        else:
            self._end_without_result(req, reason)

    def abort(self, request_id: int) -> bool:
        """End a request now, wherever it is; its ABORT is in `take_outputs`. False if there is no such request."""
        req = self._requests.get(request_id)
        if req is None:
            return False
        self._withdraw(req, FinishReason.ABORT)
        return True

    def abort_all(self, reason: str) -> None:
        """End every request with ERROR and this message. Plans in flight may still be processed."""
        for req in list(self._requests.values()):
            self._errors[req.request_id] = reason
            self._withdraw(req, FinishReason.ERROR)

    # ---------------------------------------------------------------- planning

    def schedule(self) -> StepPlan | None:
        """Plan one step; None if there is nothing to plan now or `overlap_depth` plans are in flight.

        The plan's buffer stays as it is until `overlap_depth + 2` more plans were made.
        """
        if len(self._in_flight) >= self.config.overlap_depth:
            return None
        self._give_back_rows()
        while self.decode.rows.size or self.prefill.running or len(self.policy):
            entries = self._settle_decodes()
            chunks = self.prefill.plan(self.config.max_step_tokens - len(entries.rows), self.decode.rows)
            if len(entries.rows) or chunks:
                return self._seal(entries, chunks)
            if self._in_flight or not self._make_progress_possible():
                break
        return None

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
            if short <= self._returning_pages():
                break
            running = [
                req for req in self._by_row if req is not None and req.state in (ReqState.PREFILL, ReqState.DECODE)
            ]
            if len(running) > 1:
                self._preempt(self.policy.victim(running))
            elif not (self._leaving or self._in_flight):
                self._give_up(running[0])
            else:  # pages may come back, or a token in flight may end the request: wait
                break
            rows = rows[self.rows.decoding[rows]]
        if short <= 0:
            return rows
        order = sorted(needing.tolist(), key=lambda row: self.policy.preemption_key(self._by_row[row]))
        waits = np.zeros(self.rows.num_rows, dtype=bool)
        waits[order[self.cache.available_pages :]] = True
        return rows[~waits[rows]]

    def _returning_pages(self) -> int:
        """Pages that come back without further preemption, counted generously: shared ones may not."""
        leaving = sum(self.rows.num_pages(req.table_idx) for req in self._leaving)
        last = sum(self.rows.num_pages(req.table_idx) for req in self._by_row if req and req.state is ReqState.LAST)
        return leaving + last + self.cache.quarantined_pages

    def _preempt(self, req: Req) -> None:
        """Take a request off the plan for now. It waits in line again once its results in flight are in."""
        self._stop_planning(req)
        req.state = ReqState.PREEMPTED
        self._leaving.append(req)
        self.policy.gave_back(req, req.end_len)
        self.prefill.preempted()
        self._preemptions += 1

    def _give_up(self, req: Req) -> None:
        """This request does not fit in the pool even when it runs alone."""
        config = self.config
        self._errors[req.request_id] = (
            f"request {req.request_id} outgrew the KV cache: it has {req.known_len} tokens, the pool "
            f"holds {config.num_pages} pages of {config.page_size} tokens; raise num_pages or lower max_tokens"
        )
        self._withdraw(req, FinishReason.ERROR, give_back=False)

    def _make_progress_possible(self) -> bool:
        """Nothing could be placed and nothing is in flight: give back what was given up, or preempt a prefill."""
        if self._give_back_rows():
            return True
        running = self.prefill.running
        if len(running) > 1:
            self._preempt(self.policy.victim(running))
        elif running:
            self._give_up(running[0])
        else:  # one that was preempted or recovered when it had already outgrown the pool
            self._give_up(self.prefill.turned_away)
        return True

    def _seal(self, entries: DecodeEntries, chunks: list[Chunk]) -> StepPlan:
        self._planned += 1
        plan, finished = self._builder.build(self._planned, self.decode, entries, chunks)
        unsampled: list[int] = []
        if len(finished):
            for row in finished.tolist():
                self._by_row[row].state = ReqState.LAST
            self.decode.remove(finished)
        if chunks:
            starting = []
            for chunk in chunks:
                req = chunk.req
                self._by_row[req.table_idx] = req
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
        live = plan.num_rows
        self.rows.last_plan[plan.rows[:live]] = self._planned
        if plan.num_samples == live:
            rows, positions = plan.rows[:live], plan.device_len[:live]
        else:
            at = plan.sample[: plan.num_samples]
            rows, positions = plan.rows[at], plan.device_len[at]
        self._in_flight.append(InFlight(self._planned, rows, positions, unsampled))
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
        outputs = self._apply(step, result.tokens)
        if step.unsampled:
            outputs = outputs.extended(self._end_unsampled(step))
        if self._leaving or self.cache.quarantined_pages:
            self._give_back_rows()
        return outputs

    def _apply(self, step: InFlight, tokens: np.ndarray) -> StepOutputs:
        state = self.rows
        rows, positions = step.rows.astype(np.int64), step.positions
        wanted = state.accepts[rows]
        if not wanted.all():  # R6, R7: tokens of requests that are over are dropped
            rows, positions, tokens = rows[wanted], positions[wanted], tokens[wanted]
        state.flat_tokens[state.token_base[rows] + positions] = tokens
        lengths = positions + 1
        state.known_len[rows] = lengths
        finish = np.zeros(len(rows), dtype=np.uint8)
        outputs = StepOutputs(state.request_id[rows], tokens.copy(), finish, state.cached_prompt[rows], step.step_id)
        over = lengths >= state.end_len[rows]
        stopped = state.stop_ids[0][rows] == tokens
        for column in state.stop_ids[1:]:
            stopped |= column[rows] == tokens
        over |= stopped
        if over.any():
            self._finish(rows, positions, stopped, over, finish)
        return outputs

    def _finish(
        self, rows: np.ndarray, positions: np.ndarray, stopped: np.ndarray, over: np.ndarray, finish: np.ndarray
    ) -> None:
        """Visit the entries marked `over`; fills in their `finish`."""
        ended = []
        for i in np.flatnonzero(over).tolist():
            row, position = int(rows[i]), int(positions[i])
            req = self._by_row[row]
            if stopped[i] and position >= self.rows.stop_from[row]:
                finish[i] = FinishReason.STOP
                self.rows.known_len[row] = position  # the stop token's K/V, if any, comes from a wasted step
            elif position + 1 >= req.end_len:
                finish[i] = FinishReason.LENGTH
            else:
                continue
            self._close(req)
            ended.append(row)
        self.decode.remove(ended)

    def _end_unsampled(self, step: InFlight) -> StepOutputs:
        entries = []
        for row in step.unsampled:
            req = self._by_row[row]
            if req.state is ReqState.LAST:
                entries.append((req.request_id, FinishReason.LENGTH, req.cached_prompt))
                self._close(req)
        return StepOutputs.of_finished(entries)

    def take_outputs(self) -> StepOutputs:
        """Finishes that came with no result: aborts, and requests that could not run."""
        outputs = StepOutputs.of_finished(self._ended, self._errors)
        self._ended, self._errors = [], {}
        return outputs

    # ---------------------------------------------------------------- leaving

    def _close(self, req: Req) -> None:
        """A request is over; its row, if it has one, leaves when its last plan has returned."""
        del self._requests[req.request_id]
        if req.table_idx >= 0:
            self.rows.accepts[req.table_idx] = False
            if req.state is not ReqState.PREEMPTED:
                self.policy.gave_back(req, req.end_len - req.known_len)
                self._leaving.append(req)
        req.state = ReqState.ENDED

    def _stop_planning(self, req: Req) -> None:
        if req.state is ReqState.WAITING:
            self.policy.remove(req)
            self.prefill.line_changed()
        elif req.state is ReqState.PREFILL:
            self.prefill.running.remove(req)
        elif req.state is ReqState.DECODE:
            self.decode.remove([req.table_idx])

    def _withdraw(self, req: Req, reason: FinishReason, give_back: bool = True) -> None:
        """End a request from outside of results. `give_back=False` while a plan is being made (R14)."""
        self._stop_planning(req)
        self._end_without_result(req, reason)
        if give_back:
            self._give_back_rows()

    def _end_without_result(self, req: Req, reason: FinishReason) -> None:
        self._ended.append((req.request_id, reason, max(req.cached_prompt, 0)))
        self._close(req)

    def _give_back_rows(self) -> bool:
        """Rows and pages that no plan in flight uses become free; preempted requests wait again. True if any did."""
        before = self.cache.free_pages
        self.cache.release_quarantine(self._returned)
        if self._leaving:
            leaving, self._leaving = self._leaving, []
            for req in leaving:
                if self.rows.last_plan[req.table_idx] <= self._returned:
                    self._give_back(req)
                else:
                    self._leaving.append(req)
            return len(self._leaving) < len(leaving) or self.cache.free_pages > before
        return self.cache.free_pages > before

    def _give_back(self, req: Req) -> None:
        row = req.table_idx
        if req.state is ReqState.PREEMPTED:
            req.ids = req.input_ids.copy()
        self.cache.cache_req(req, finished=True)
        self.rows.release(row)
        self._by_row[row] = None
        req.table_idx = -1
        if req.state is ReqState.PREEMPTED:
            self._line_up(req)

    def _line_up(self, req: Req) -> None:
        req.state = ReqState.WAITING
        self.policy.push(req)
        self.prefill.line_changed()

    def recover(self) -> None:
        """The workers are new: forget plans in flight and all K/V, and put every unfinished request back in its place
        in line with the tokens that have arrived (R12)."""
        self._in_flight.clear()
        self._leaving.clear()
        self.decode.clear()
        self.prefill.running.clear()
        self._returned = self._planned
        for req in self._requests.values():
            if req.table_idx >= 0:
                req.ids = req.input_ids.copy()
                req.table_idx = -1
                req.handle = None
                if req.state is not ReqState.PREEMPTED:
                    self.policy.gave_back(req, req.end_len)
                self._line_up(req)
        self._by_row = [None] * self.config.max_running_requests
        self.rows.reset()
        self.cache.reset()

    # ---------------------------------------------------------------- state

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not been processed."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether any request waits, runs, or has yet to give its row back."""
        return bool(self._requests or self._leaving)

    def stats(self) -> SchedulerStats:
        """Constant cost."""
        return SchedulerStats(
            running=self.rows.used_rows,
            waiting=len(self.policy),
            free_pages=self.cache.free_pages,
            total_pages=self.config.num_pages,
            cached_pages=self.cache.prefix_cache.size_info.total_size // self.config.page_size,
            prefilled_tokens=self.prefill.prefilled_tokens,
            cached_tokens=self.prefill.cached_tokens,
            preemptions=self._preemptions,
            steps=self._planned,
            in_flight=len(self._in_flight),
        )

    def check_integrity(self) -> None:
        """R10: raises IntegrityError unless every page has exactly one owner. Cost grows with the pool."""
        self.cache.check_integrity([req for req in self._by_row if req is not None])
