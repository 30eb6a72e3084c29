"""The scheduler's promises in small: twins, exact lengths, errors, abort, recovery, policies, on the fake worker."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from scheduler import FinishReason, InvalidRequest, Request, SamplingParams, Scheduler, SchedulerConfig
from scheduler.fake_model import FakeModel
from scheduler.fake_worker import FakeWorker


def config(**changes) -> SchedulerConfig:
    values = {
        "num_pages": 64, "page_size": 4, "max_running_requests": 8, "max_seq_len": 128, "max_step_tokens": 64,
        "eos_token_ids": (0,),
    }  # fmt: skip
    return SchedulerConfig(**(values | changes))


def request(request_id: int, ids, max_tokens: int = 5, **options) -> Request:
    fields = {name: options.pop(name) for name in ("priority", "user", "prompt_len") if name in options}
    sampling = SamplingParams(**({"max_tokens": max_tokens, "seed": request_id} | options))
    return Request(request_id, np.asarray(ids, dtype=np.int32), sampling, **fields)


class Run:
    """A scheduler and a fake worker in lock-step: results return `overlap_depth` plans later."""

    def __init__(self, config: SchedulerConfig, eos_probability: float = 0.0) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.model = FakeModel(vocab_size=1000, eos_probability=eos_probability)
        self.worker = FakeWorker(config, self.model)
        self.results: deque = deque()
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.errors: dict[int, str] = {}

    def absorb(self, outputs) -> None:
        for request_id, token, finish in zip(outputs.request_ids, outputs.tokens, outputs.finish, strict=True):
            assert int(request_id) not in self.finish
            self.tokens.setdefault(int(request_id), []).extend([int(token)] if token >= 0 else [])
            if finish:
                self.finish[int(request_id)] = FinishReason(int(finish))
        self.errors |= outputs.errors

    def step(self) -> bool:
        """Plan if possible, else take a result; False when there was neither."""
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is not None:
            self.results.append(self.worker.execute(plan))
        elif self.results:
            self.absorb(self.scheduler.process(self.results.popleft()))
            self.scheduler.check_integrity()
        self.absorb(self.scheduler.take_outputs())
        return plan is not None or bool(self.results) or self.scheduler.has_work

    def finish_all(self) -> None:
        for _ in range(10_000):
            if not self.step():
                break
        stats = self.scheduler.stats()
        assert not self.scheduler.has_work and self.scheduler.num_in_flight == 0
        assert stats.running == 0 and stats.free_pages + stats.cached_pages == self.config.num_pages


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [7, 64, 8192])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("length", [96, 97])
@pytest.mark.parametrize("staggered", [False, True])
def test_twins_share_all_but_the_last_page(page_size, budget, length, staggered, depth):
    copies = 9
    run = Run(
        config(
            num_pages=2000 // page_size, page_size=page_size, max_step_tokens=budget, max_running_requests=6,
            overlap_depth=depth,
        )
    )  # fmt: skip
    prompt = np.arange(1, length + 1)
    for i in range(copies):
        run.scheduler.add(request(i, prompt, max_tokens=4))
        if staggered:
            run.step()
            run.step()
    run.finish_all()
    expected = length + (copies - 1) * (length - (length - 1) // page_size * page_size)
    assert run.scheduler.stats().prefilled_tokens == run.worker.prefilled_tokens == expected


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 3, 64])
def test_max_tokens_is_exact_and_wastes_no_step(depth, budget):
    run = Run(config(overlap_depth=depth, max_step_tokens=budget))
    for i in range(6):
        run.scheduler.add(request(i, [i + 1] * (i + 1), max_tokens=i))
    run.finish_all()
    assert {i: len(tokens) for i, tokens in run.tokens.items()} == {i: i for i in range(6)}
    assert set(run.finish.values()) == {FinishReason.LENGTH}
    if budget == 64:
        assert run.scheduler.stats().steps == 5


def test_a_request_that_outgrows_the_pool_alone_ends_with_an_error():
    run = Run(config(num_pages=4))
    run.scheduler.add(request(0, range(1, 13), max_tokens=20))
    run.scheduler.add(request(1, range(1, 5), max_tokens=2))
    run.finish_all()
    assert run.finish == {0: FinishReason.INVALID, 1: FinishReason.LENGTH}
    assert "4 pages of 4 tokens" in run.errors[0] and len(run.tokens[0]) == 5


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda: request(0, []), "empty"),
        (lambda: request(0, range(128)), "max_seq_len 128"),
        (lambda: request(0, range(100), max_tokens=29), "at most 28"),
        (lambda: Request(0, np.arange(3), SamplingParams(max_tokens=3)), "seed"),
        (lambda: Request(0, np.arange(3), SamplingParams(seed=3)), "max_tokens"),
        (lambda: request(0, [3, -1]), "-1"),
        (lambda: request(0, [[3], [1]]), "shape"),
        (lambda: request(0, range(8), max_tokens=2, prompt_len=5), "more than its max_tokens"),
        (lambda: request(0, range(80), max_tokens=1), "raise num_pages"),
    ],
)
def test_requests_that_cannot_run_are_refused(bad, says):
    scheduler = Scheduler(config(num_pages=16))
    with pytest.raises(InvalidRequest, match=says):
        scheduler.add(bad())
    assert not scheduler.has_work


def test_an_id_in_use_is_refused():
    scheduler = Scheduler(config())
    scheduler.add(request(7, [1]))
    with pytest.raises(InvalidRequest, match="7 is in use"):
        scheduler.add(request(7, [2]))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_recovery_goes_on_where_the_stream_stopped(depth):
    def outputs(crash_after: int | None) -> dict[int, list[int]]:
        run = Run(config(overlap_depth=depth, max_step_tokens=16))
        for i in range(4):
            run.scheduler.add(request(i, range(i + 1, i + 20), max_tokens=12))
        for step in range(200):
            if step == crash_after:
                run.scheduler.recover()
                run.scheduler.check_integrity()
                run.results.clear()
                run.worker = FakeWorker(run.config, run.model)
            run.step()
        run.finish_all()
        return run.tokens

    expected = outputs(None)
    assert all(outputs(crash) == expected for crash in range(0, 30, 3))


@pytest.mark.parametrize("resumed", range(1, 12))
def test_a_resumed_request_counts_from_its_prompt(resumed):
    alone = Run(config())
    alone.scheduler.add(request(3, range(1, 20), max_tokens=12))
    alone.finish_all()
    tokens = alone.tokens[3]
    run = Run(config())
    run.scheduler.add(request(3, [*range(1, 20), *tokens[:resumed]], max_tokens=12, prompt_len=19))
    run.finish_all()
    assert tokens[:resumed] + run.tokens[3] == tokens


def test_a_resumed_request_that_was_over_ends_at_once():
    run = Run(config())
    run.scheduler.add(request(0, range(1, 9), max_tokens=3, prompt_len=5))
    run.scheduler.add(request(1, [5, 6, 0], max_tokens=30, prompt_len=1))
    run.absorb(run.scheduler.take_outputs())
    assert run.finish == {0: FinishReason.LENGTH, 1: FinishReason.STOP}
    assert not run.scheduler.has_work


def order_of_first_tokens(policy: str, requests: list[Request], **changes) -> list[int]:
    run = Run(config(policy=policy, max_running_requests=1, **changes))
    for item in requests:
        run.scheduler.add(item)
    run.finish_all()
    return list(run.tokens)


def test_priority_goes_first():
    requests = [request(i, [i + 1] * 5, max_tokens=2, priority=i % 3) for i in range(6)]
    assert order_of_first_tokens("fcfs", requests) == [0, 1, 2, 3, 4, 5]
    assert order_of_first_tokens("priority", requests) == [2, 5, 1, 4, 0, 3]


def test_fair_share_takes_turns_between_users():
    requests = [request(i, [i + 1] * 5, max_tokens=2, user="many" if i < 4 else "few") for i in range(6)]
    assert order_of_first_tokens("fair_share", requests) == [0, 4, 1, 5, 2, 3]


def test_longest_prefix_goes_first_but_nobody_starves():
    prefix = list(range(1, 33))
    requests = [request(0, [*prefix, 50], max_tokens=2), request(1, [99] * 8, max_tokens=2)]
    requests += [request(i, [*prefix, 50 + i], max_tokens=2) for i in range(2, 80)]
    order = order_of_first_tokens("longest_prefix", requests)
    assert order[1] != 1 and order.index(1) == 65  # passed over 64 times


def test_plans_do_not_depend_on_anything_but_the_calls():
    def plans() -> list[bytes]:
        run = Run(config(num_pages=20, max_step_tokens=9), eos_probability=0.05)
        seen = []
        for i in range(12):
            run.scheduler.add(request(i, [1, 2, 3, 4, 5 + i % 3] * (1 + i % 4), max_tokens=30, user=str(i % 2)))
        while run.scheduler.has_work:
            plan = run.scheduler.schedule()
            if plan is not None:
                seen.append(plan.buffer.tobytes())
                run.results.append(run.worker.execute(plan))
            else:
                run.scheduler.process(run.results.popleft())
        assert run.scheduler.stats().preemptions > 0
        return seen

    assert plans() == plans()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("page_size", "budget"), [(4, 8), (4, 6), (16, 7), (16, 24), (1, 3)])
@pytest.mark.parametrize("steps_before", [1, 2, 3])
def test_an_overtaken_prefill_goes_on_from_the_pages_of_its_overtaker(steps_before, page_size, budget, depth):
    run = Run(
        config(
            policy="priority", page_size=page_size, num_pages=512 // page_size, max_step_tokens=budget,
            overlap_depth=depth,
        )
    )  # fmt: skip
    prompt = np.arange(1, 101)
    run.scheduler.add(request(0, prompt, max_tokens=6, priority=0))
    planned = 0
    while planned < steps_before:
        before = run.scheduler.stats().steps
        run.step()
        planned += run.scheduler.stats().steps - before
    run.scheduler.add(request(1, [*prompt[:90].tolist(), *range(200, 225)], max_tokens=6, priority=1))
    run.finish_all()
    assert list(run.tokens) == [1, 0] and run.scheduler.stats().cached_tokens > 0
    shared = 90 // page_size * page_size
    once = 100 + 115 - shared
    # A page that a small budget cut in two is computed again by the one who overtakes, and nothing else is.
    assert once <= run.scheduler.stats().prefilled_tokens <= once + (page_size if budget < page_size else 0)
    alone = Run(config())
    alone.scheduler.add(request(0, prompt, max_tokens=6))
    alone.finish_all()
    assert run.tokens[0] == alone.tokens[0]


def test_nothing_is_left_behind_by_a_schedule_that_plans_nothing():
    run = Run(config(num_pages=4))
    run.scheduler.add(request(0, range(1, 17), max_tokens=20))
    plan = run.scheduler.schedule()
    assert run.scheduler.schedule() is None  # the next token has no page, but the one in flight may be the last
    run.absorb(run.scheduler.process(run.worker.execute(plan)))
    assert run.scheduler.schedule() is None and not run.scheduler.has_work
    run.absorb(run.scheduler.take_outputs())
    assert run.finish == {0: FinishReason.INVALID}
