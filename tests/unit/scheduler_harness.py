"""Drives a `Scheduler` against a `FakeWorker` as the engine's driver does, and checks everything after every event."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.fake_extras import draw_allowed, fake_logprobs
from scheduler.fake_model import FakeModel, content_sums
from scheduler.fake_worker import FakeWorker
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.step import SAMPLING_WORDS, LogprobBlock, S, StepPlan, StepResult, pack_sampling


def make_config(**changes: object) -> SchedulerConfig:
    """A small scheduler; every test names what matters to it."""
    values = {"num_pages": 64, "page_size": 4, "max_running_requests": 8, "max_seq_len": 128, "max_step_tokens": 64}
    return SchedulerConfig(**(values | changes))


def make_request(request_id: int, prompt: object, max_tokens: int = 4, **sampling: object) -> Request:
    """Greedy unless told otherwise. `request_` keys go to the request, the rest to its sampling parameters."""
    of_request = {
        key.removeprefix("request_"): sampling.pop(key) for key in list(sampling) if key.startswith("request_")
    }
    if of_request.get("constraint") is not None:
        of_request["constraint"] = of_request["constraint"].fresh()
    params = SamplingParams(**({"temperature": 0.0, "seed": 0} | sampling), max_tokens=max_tokens)
    return Request(request_id, np.asarray(prompt, dtype=np.int32), params, **of_request)


def run_alone(request: Request, model: FakeModel, config: SchedulerConfig) -> tuple[list[int], FinishReason]:
    """What the request gives when nothing else exists: the definition every scheduled run is held against."""
    params = request.sampling
    prompt_len = len(request.prompt_ids) if request.prompt_len is None else request.prompt_len
    entry = np.zeros((1, SAMPLING_WORDS), dtype=np.int32)
    pack_sampling(
        entry[0], row=0, temperature=params.temperature, top_p=params.top_p, min_p=params.min_p,
        top_k=max(params.top_k, 0), seed=params.seed, prompt_len=prompt_len,
    )  # fmt: skip
    key = int(model.sampling_keys(entry)[0])
    tokens = request.prompt_ids.tolist()
    limit = prompt_len + params.max_tokens
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(config.eos_token_ids))
    output: list[int] = []
    constraint = None if request.constraint is None else request.constraint.fresh()
    while len(tokens) < limit and not (constraint is not None and constraint.is_complete):
        early = len(tokens) < prompt_len + params.min_tokens
        suppressed = stops if early else ()
        content = int(content_sums(np.array(tokens, dtype=np.int32))[-1])
        if constraint is None:
            tokens.append(model.next_token(content, key, suppressed))
        else:
            tokens.append(draw_allowed(constraint.mask(), content))
        output.append(tokens[-1])
        if output[-1] in stops and not early:
            return output, FinishReason.STOP
        if constraint is not None:
            constraint.accept(output[-1:])
    return output, FinishReason.LENGTH if len(tokens) >= limit else FinishReason.STOP


@dataclass
class Stream:
    """What the driver saw of one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason = FinishReason.NONE
    cached_tokens: int | None = None
    aborted: bool = False
    error: str = ""
    logprobs: list[np.ndarray] = field(default_factory=list)  # words of each token's
    prompt_logprobs: LogprobBlock | None = None


class Harness:
    """One scheduler, one worker, and results that arrive when the test says so.

    `late=True` executes a plan only when its result is delivered (a slow worker: the plan's buffer must still be
    valid); otherwise at once, from a copy that went through encode and decode.
    """

    def __init__(self, config: SchedulerConfig, model: FakeModel | None = None, *, late: bool = False) -> None:
        self.config = config
        self.model = model or FakeModel(vocab_size=1000)
        self.late = late
        self.scheduler = Scheduler(config)
        self.streams: dict[int, Stream] = {}
        self.plans: list[np.ndarray] = []  # every plan's buffer, for tests that look at them
        self.prefilled_tokens = 0
        self._fresh_worker()

    def _fresh_worker(self) -> None:
        self.worker = FakeWorker(self.config, self.model)
        self.in_flight: deque[tuple[StepPlan, StepResult | None, set[int]]] = deque()

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.validate(request)
            self.scheduler.add(request)
            self.streams[request.request_id] = Stream(request)
        self._after()

    def abort(self, request_id: int) -> bool:
        stream = self.streams.get(request_id)
        known = self.scheduler.abort(request_id)
        if stream is not None:
            assert known or stream.finish != FinishReason.NONE, f"abort does not know live request {request_id}"
            stream.aborted |= known
        self._after()
        return known

    def plan(self) -> StepPlan | None:
        """Plan one step, if the scheduler wants to."""
        if len(self.in_flight) == self.config.overlap_depth:
            assert self.scheduler.schedule() is None  # and it did nothing: no need to look
            return None
        owners = self._page_owners() if self.in_flight else {}
        plan = self.scheduler.schedule()
        if plan is not None:
            copy = StepPlan.decode(plan.buffer.copy())
            if self.in_flight:  # otherwise the scheduler may start afresh with what it has just given up
                self._check_handed_out(copy, owners)
            self.plans.append(copy.buffer)
            self.prefilled_tokens += len(copy.run_tokens)
            self.in_flight.append((plan if self.late else copy, None, set()))
            assert len(self.in_flight) <= self.config.overlap_depth
            if not self.late:
                self.in_flight[-1] = (copy, self.worker.execute(copy), self._pages_read(copy))
        assert self.scheduler.num_in_flight == len(self.in_flight)
        self._after()
        return plan

    def deliver(self) -> bool:
        """Hand the oldest result to the scheduler. False when nothing is in flight."""
        if not self.in_flight:
            return False
        plan, result, _ = self.in_flight.popleft()
        if result is None:
            result = self.worker.execute(StepPlan.decode(plan.buffer))
        outputs = self.scheduler.process(StepResult.decode(result.encode()))
        assert outputs.step_id == result.step_id
        self._record(outputs)
        self._after()
        return True

    def step(self) -> bool:
        """Plan as deep as allowed, then take one result. False when there was nothing to do."""
        planned = False
        while self.plan() is not None:
            planned = True
        return self.deliver() or planned

    def recover(self) -> None:
        """The workers died: plans in flight are lost with them and new workers start empty."""
        self.scheduler.recover()
        self._fresh_worker()
        self._after()

    def drain(self, limit: int = 20_000) -> None:
        """Run until nothing is left. Fails when the scheduler stops making progress."""
        for _ in range(limit):
            if not self.step() and not self.scheduler.has_work:
                return
            assert self.in_flight or self.plan_or_idle(), f"stuck with work left: {self.scheduler.stats()}"
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.stats()}")

    def plan_or_idle(self) -> bool:
        return self.plan() is not None or not self.scheduler.has_work

    def finish(self) -> None:
        """Drain, then: every page is back and every output is what the request gives alone."""
        self.drain()
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, self.scheduler.num_in_flight) == (0, 0, 0), stats
        assert stats.free_pages + stats.cached_pages == stats.total_pages == self.config.num_pages, stats
        assert stats.prefilled_tokens == self.prefilled_tokens, stats
        for stream in self.streams.values():
            self._check_stream(stream)

    def run(self, *requests: Request) -> list[list[int]]:
        """Add, run to the end, check; the outputs of these requests."""
        self.add(*requests)
        self.finish()
        return [self.streams[request.request_id].tokens for request in requests]

    def free_pages(self) -> set[int]:
        """Page numbers in the free list."""
        return {int(slot) // self.config.page_size for slot in self.scheduler.cache.free_slots}

    def cached_pages(self) -> set[int]:
        """Page numbers in the prefix cache."""
        return {int(slot) // self.config.page_size for slot in self.scheduler.cache.prefix_cache.page_starts()}

    def _page_owners(self) -> dict[int, int]:
        """Private page -> row, for the rows that run; rows on their way out may give theirs back at any time."""
        rows, size = self.scheduler.rows, self.config.page_size
        shared = self.cached_pages()
        owners = {}
        for req in self.scheduler._table.running():
            pages = rows.page_table[req.table_idx, : rows.num_pages(req.table_idx)] // size
            owners |= dict.fromkeys(set(pages.tolist()) - shared, req.table_idx)
        return owners

    def _check_handed_out(self, plan: StepPlan, owners: dict[int, int]) -> None:
        """R14: a page that a running row had when planning began went to others only if that row is in the plan too
        (and has just put the page into the tree)."""
        staying = set(plan.rows[: plan.num_rows].tolist()) - set(plan.sampling[:, S.ROW].tolist())
        for row, position, slot in plan.page_deltas.tolist():
            owner = owners.get(slot // self.config.page_size)
            where = f"slot {slot}, named for row {row} position {position}, was row {owner}'s when planning began"
            assert owner is None or owner in staying, where

    def _pages_read(self, plan: StepPlan) -> set[int]:
        """Pages that the page table names for the plan's rows: they may not be given away while it is in flight."""
        pages: set[int] = set()
        for row, device_len in zip(plan.rows[: plan.num_rows].tolist(), plan.device_len.tolist(), strict=False):
            pages.update((self.worker.slots(row, 0, device_len) // self.config.page_size).tolist())
        return pages

    def _record(self, outputs: StepOutputs) -> None:
        columns = (outputs.request_ids, outputs.tokens, outputs.finish, outputs.cached_tokens)
        assert len({len(column) for column in columns}) == 1
        for request_id, token, finish, cached in zip(*(column.tolist() for column in columns), strict=True):
            stream = self.streams[request_id]
            assert stream.finish == FinishReason.NONE, f"request {request_id} gets {token}, {finish} after its finish"
            assert token < 0 or not stream.aborted, f"request {request_id} gets token {token} after its abort"
            assert stream.cached_tokens in (None, cached) or token < 0, "cached_tokens changed"
            if token >= 0:
                stream.tokens.append(token)
                stream.cached_tokens = cached
            stream.finish = FinishReason(finish)
            if finish in (FinishReason.ERROR, FinishReason.INVALID):
                stream.error = outputs.errors[request_id]
        if outputs.logprobs is not None:
            for entry, words in zip(outputs.logprobs.index.tolist(), outputs.logprobs.block.words, strict=True):
                stream = self.streams[int(outputs.request_ids[entry])]
                top = stream.request.sampling.logprobs
                stream.logprobs.append(LogprobBlock(words[None].copy()).narrowed(top).words)
        for request_id, block in outputs.prompt_logprobs.items():
            assert request_id in outputs.request_ids and self.streams[request_id].prompt_logprobs is None
            self.streams[request_id].prompt_logprobs = block

    def _after(self) -> None:
        outputs = self.scheduler.take_outputs()
        if outputs is not None:
            self._record(outputs)
        self.scheduler.check_integrity()
        free = None
        for plan, _, pages in self.in_flight:
            free = self.free_pages() if free is None else free
            assert not free & pages, f"free list holds pages {sorted(free & pages)} that step {plan.step_id} uses"

    def _check_stream(self, stream: Stream) -> None:
        request, tokens = stream.request, stream.tokens
        expected, finish = run_alone(request, self.model, self.config)
        name = f"request {request.request_id}"
        assert stream.finish != FinishReason.NONE, f"{name} never finished"
        if stream.finish in (FinishReason.ABORT, FinishReason.INVALID):
            assert tokens == expected[: len(tokens)], f"{name}: {tokens} is not how {expected} starts"
            if stream.finish == FinishReason.ABORT:
                assert stream.aborted, f"{name} was aborted by nobody"
            else:
                stored = len(request.prompt_ids) + len(expected) - 1
                capacity = self.config.num_pages * self.config.page_size
                assert stored > capacity, f"{name} failed ({stream.error}), but {stored} tokens fit in {capacity} slots"
        else:
            assert (tokens, stream.finish) == (expected, finish), f"{name}: {tokens} {stream.finish}, alone {expected}"
        self._check_logprobs(stream, complete=stream.finish not in (FinishReason.ABORT, FinishReason.INVALID))

    def _check_logprobs(self, stream: Stream, complete: bool) -> None:
        """Every token has its log probabilities, those of its position, if the request asked for any."""
        request, top = stream.request, stream.request.sampling.logprobs
        assert len(stream.logprobs) == (0 if top is None else len(stream.tokens))
        if stream.logprobs:
            positions = np.arange(len(stream.tokens)) + len(request.prompt_ids)
            words = fake_logprobs(np.array(stream.tokens, dtype=np.int32), positions, top).words
            np.testing.assert_array_equal(np.concatenate(stream.logprobs), words)
        top, prompt = request.sampling.prompt_logprobs, request.prompt_ids[1 : request.prompt_len]
        if top is None or not len(prompt):
            assert stream.prompt_logprobs is None
        elif stream.prompt_logprobs is not None or complete:
            words = fake_logprobs(prompt, np.arange(1, request.prompt_len), top).words
            np.testing.assert_array_equal(stream.prompt_logprobs.words, words)
