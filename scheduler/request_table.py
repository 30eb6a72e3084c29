"""All unfinished requests and their ways: into line, onto a row, off it, and out."""

from __future__ import annotations

import numpy as np

from scheduler.cache_manager import CacheManager
from scheduler.constraint import ConstraintError
from scheduler.decode import DecodeBatch
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.policies import Policy
from scheduler.prefill import PrefillPlanner
from scheduler.request import InvalidRequest, Req, ReqState
from scheduler.row_state import RowState


class RequestTable:
    """Moves requests between their states::

        WAITING --> PREFILL --> DECODE --> LAST --> ENDED
           ^           |          |
           +------- PREEMPTED <---+         and from anywhere to ENDED

    While only one request may run (`run_only`), the others are HELD where they would be WAITING.

    Whoever leaves a row early (PREEMPTED, ENDED) keeps row and pages until the last plan that uses them has returned
    (R7); `give_back_rows` then lets go of them.
    """

    def __init__(
        self, rows: RowState, cache: CacheManager, policy: Policy, decode: DecodeBatch, prefill: PrefillPlanner
    ) -> None:
        self._rows = rows
        self._cache = cache
        self._policy = policy
        self._decode = decode
        self._prefill = prefill
        self.unfinished: dict[int, Req] = {}  # by request id, in order of arrival
        self.by_row: list[Req | None] = [None] * rows.num_rows
        self.leaving: list[Req] = []  # rows to be given back when their last plan has returned
        self.preemptions = 0
        self.only: int | None = None  # the one request that may run; None: all may
        self._ended: list[tuple[int, FinishReason, int]] = []  # finishes that came with no result
        self._errors: dict[int, str] = {}

    def add(self, req: Req) -> None:
        """A new request joins the line, unless it is over already. Raises InvalidRequest for an id in use."""
        if req.request_id in self.unfinished:
            raise InvalidRequest(f"request id {req.request_id} is in use by an unfinished request")
        self.unfinished[req.request_id] = req
        try:
            reason = req.finish_before_start()
        except ConstraintError as error:
            reason = FinishReason.ERROR
            self._errors[req.request_id] = f"the tokens generated before do not follow the constraint: {error}"
        if reason is FinishReason.NONE:
            self._line_up(req)
        else:
            self._end_without_result(req, reason)

    def running(self) -> list[Req]:
        """Requests on a row that are still to be planned, by row."""
        return [req for req in self.by_row if req and req.state in (ReqState.PREFILL, ReqState.DECODE)]

    def with_row(self) -> list[Req]:
        return [req for req in self.by_row if req]

    def returning_pages(self) -> int:
        """Pages that come back without further preemption, counted generously: shared ones may not."""
        leaving = sum(self._rows.num_pages(req.table_idx) for req in self.leaving)
        last = sum(self._rows.num_pages(req.table_idx) for req in self.by_row if req and req.state is ReqState.LAST)
        return leaving + last + self._cache.quarantined_pages

    def preempt(self, req: Req) -> None:
        """Take a request off the plan for now. It waits in line again once its results in flight are in."""
        self._stop_planning(req)
        req.state = ReqState.PREEMPTED
        self.leaving.append(req)
        self._policy.gave_back(req, req.end_len)
        self._prefill.preempted()
        self.preemptions += 1

    def withdraw(self, req: Req, reason: FinishReason, error: str | None = None) -> None:
        """End a request from outside of results. Its row, if no plan uses it, is free after `give_back_rows`."""
        if error is not None:
            self._errors[req.request_id] = error
        self._stop_planning(req)
        self._end_without_result(req, reason)

    def end_holders(self, pages: np.ndarray | None, reason: str) -> list[int]:
        """End with ERROR the requests whose rows hold one of these pages (numbers; None: all that have a row)."""
        ended = []
        for req in list(self.unfinished.values()):
            if req.table_idx >= 0:
                held = self._rows.page_table[req.table_idx, : self._rows.num_pages(req.table_idx)]
                if pages is None or np.isin(held // self._rows.page_size, pages).any():
                    self.withdraw(req, FinishReason.ERROR, reason)
                    ended.append(req.request_id)
        return ended

    def follow_constraints(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Rows were given these tokens: the constraints among them go on, and requests end whose constraint is complete
        or broken. Those whose end is known already are passed over."""
        for at in np.flatnonzero(self._rows.constrained[rows]).tolist():
            req = self.by_row[rows[at]]
            if req.state is ReqState.ENDED:
                continue
            try:
                req.request.constraint.accept([int(tokens[at])])
            except ConstraintError as error:
                self.withdraw(req, FinishReason.INVALID, str(error))
            else:
                if req.request.constraint.is_complete:
                    self.withdraw(req, FinishReason.STOP)

    def close(self, req: Req) -> None:
        """A request is over; its row, if it has one, leaves when its last plan has returned."""
        del self.unfinished[req.request_id]
        if req.table_idx >= 0:
            self._rows.accepts[req.table_idx] = False
            if req.state is not ReqState.PREEMPTED:
                self._policy.gave_back(req, req.end_len - req.known_len)
                self.leaving.append(req)
        req.state = ReqState.ENDED

    def take_outputs(self) -> StepOutputs:
        """Finishes that came with no result, since the last call."""
        outputs = StepOutputs.of_finished(self._ended, self._errors)
        self._ended, self._errors = [], {}
        return outputs

    def give_back_rows(self, returned: int) -> None:
        """Let go of rows and pages that only plans up to `returned` use; preempted requests wait again.

        Not while a plan is being made (R14).
        """
        self._cache.release_quarantine(returned)
        if self.leaving:
            leaving, self.leaving = self.leaving, []
            for req in leaving:
                if self._rows.last_plan[req.table_idx] <= returned:
                    self._give_back(req)
                else:
                    self.leaving.append(req)

    def run_only(self, request_id: int | None) -> None:
        """Let no other request run than this one, or all of them again (None). Places in line are kept."""
        if request_id == self.only:
            return
        self.only = request_id
        for req in self.running():
            if request_id is not None and req.request_id != request_id:
                self.preempt(req)
        for req in self.unfinished.values():
            if req.state in (ReqState.WAITING, ReqState.HELD):
                self._stop_planning(req)
                self._line_up(req)

    def num_held(self) -> int:
        return 0 if self.only is None else sum(req.state is ReqState.HELD for req in self.unfinished.values())

    def recover(self) -> None:
        """Everything on a row waits again with the tokens known so far; rows, pages and the cache start afresh."""
        self.leaving.clear()
        self._decode.clear()
        self._prefill.running.clear()
        for req in self.unfinished.values():
            if req.table_idx >= 0:
                req.ids = req.input_ids.copy()
                req.table_idx = -1
                req.handle = None
                if req.state is not ReqState.PREEMPTED:
                    self._policy.gave_back(req, req.end_len)
                self._line_up(req)
        self.by_row = [None] * len(self.by_row)
        self._rows.reset()
        self._cache.reset()

    def _line_up(self, req: Req) -> None:
        if self.only is not None and req.request_id != self.only:
            req.state = ReqState.HELD
            return
        req.state = ReqState.WAITING
        self._policy.push(req)
        self._prefill.line_changed()

    def _stop_planning(self, req: Req) -> None:
        if req.state is ReqState.WAITING:
            self._policy.remove(req)
            self._prefill.line_changed()
        elif req.state is ReqState.PREFILL:
            self._prefill.running.remove(req)
        elif req.state is ReqState.DECODE:
            self._decode.remove([req.table_idx])

    def _end_without_result(self, req: Req, reason: FinishReason) -> None:
        self._ended.append((req.request_id, reason, max(req.cached_prompt, 0)))
        self.close(req)

    def _give_back(self, req: Req) -> None:
        row = req.table_idx
        if req.state is ReqState.PREEMPTED:
            req.ids = req.input_ids.copy()
        self._cache.cache_req(req, finished=True)
        self._rows.release(row)
        self.by_row[row] = None
        req.table_idx = -1
        if req.state is ReqState.PREEMPTED:
            self._line_up(req)
