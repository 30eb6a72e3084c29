"""DESIGN's rules that are easy to get wrong: one test each, which fails when the rule is broken."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from kvcache.base import IntegrityError
from scheduler.fake_model import FakeModel, content_sums
from scheduler.outputs import FinishReason
from scheduler.request import InvalidRequest, Request
from scheduler.sampling_params import SamplingParams
from scheduler.step import S, StepPlan
from tests.unit.scheduler_harness import Harness, make_config, make_request, run_alone

EOS = 3
POLICIES = ("fcfs", "longest_prefix", "priority", "fair_share")


class ScriptedModel(FakeModel):
    """Samples EOS for the sequences whose content is listed, something else for all others."""

    def __init__(self, *stopping: list[int]) -> None:
        super().__init__(vocab_size=1000)
        self.stopping = {int(content_sums(np.array(tokens, dtype=np.int32))[-1]) for tokens in stopping}

    def next_tokens(self, contents: np.ndarray, keys: np.ndarray) -> np.ndarray:
        tokens = super().next_tokens(contents, keys)
        tokens[tokens == EOS] = EOS + 1
        tokens[[int(content) in self.stopping for content in contents]] = EOS
        return tokens


def stops_after(prompt: list[int], num_tokens: int) -> tuple[ScriptedModel, list[int]]:
    """A model that ends this greedy prompt with EOS as its last of `num_tokens` tokens, and those tokens."""
    free, _ = run_alone(
        make_request(0, prompt, max_tokens=num_tokens - 1), ScriptedModel(), make_config(max_seq_len=4096)
    )
    return ScriptedModel([*prompt, *free]), [*free, EOS]


def plans_of(harness: Harness) -> list[StepPlan]:
    return [StepPlan.decode(buffer) for buffer in harness.plans]


def cached_slots(harness: Harness) -> int:
    return harness.scheduler.stats().cached_pages * harness.config.page_size


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("length", [4, 8, 13])
def test_r1_last_prompt_token_is_always_computed(page_size: int, length: int) -> None:
    harness = Harness(make_config(page_size=page_size))
    prompt = list(range(10, 10 + length))
    harness.run(make_request(1, prompt))
    harness.plans.clear()
    harness.run(make_request(2, prompt))
    assert harness.streams[2].cached_tokens == (length - 1) // page_size * page_size
    first = plans_of(harness)[0]
    assert first.device_len[0] == length and first.device_len[0] - first.cached_len[0] >= 1


@pytest.mark.parametrize("depth", [2, 3])
def test_r2_capacity_is_checked_again_after_the_lock(depth: int) -> None:
    """Ten pages: six hold a cold prompt, three a running row, one is free. The newcomer matches the six and needs
    two more: before the lock seven seem to be there, after it only one is, so it waits for the row's three."""
    harness = Harness(make_config(page_size=1, num_pages=10, overlap_depth=depth, max_step_tokens=16))
    cold = [10, 11, 12, 13, 14, 15]
    harness.run(make_request(1, cold, max_tokens=0))
    assert harness.scheduler.stats().cached_pages == 6
    harness.add(make_request(2, [20, 21, 22], max_tokens=1))
    assert harness.plan() is not None
    harness.add(make_request(3, [*cold, 16, 17], max_tokens=1))
    assert harness.plan() is None
    harness.deliver()
    assert harness.plan() is not None
    harness.finish()
    assert harness.streams[3].cached_tokens == 6 and harness.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("depth", [2, 3])
def test_r3_duplicates_are_freed_after_the_last_planned_step_that_reads_them(depth: int) -> None:
    """Two greedy twins write the same tokens into pages of their own and stop together on EOS, which the scheduler
    learns with depth - 1 more steps of both planned. One copy stays in the tree; the other may be free only when
    those steps have returned (the harness compares the free list with every step in flight)."""
    prompt = list(range(10, 18))
    model, expected = stops_after(prompt, 12)
    harness = Harness(make_config(page_size=4, eos_token_ids=(EOS,), overlap_depth=depth), model)
    outputs = harness.run(make_request(1, prompt, max_tokens=40), make_request(2, prompt, max_tokens=40))
    assert outputs == [expected, expected]
    assert cached_slots(harness) == (len(prompt) + len(expected) - 1) // 4 * 4
    # One twin goes on longer: its first pages are duplicates, its last ones are not.
    harness = Harness(make_config(page_size=4, overlap_depth=depth))
    harness.run(make_request(1, prompt, max_tokens=9), make_request(2, prompt, max_tokens=22))
    assert cached_slots(harness) == 28


def test_r4_the_tail_page_is_private_and_freed_once() -> None:
    harness = Harness(make_config(page_size=16, num_pages=8))
    prompt = list(range(10, 30))
    harness.add(make_request(1, prompt, max_tokens=5), make_request(2, prompt, max_tokens=5))
    while harness.scheduler.has_work:
        harness.step()
        tails = {int(harness.worker.page_table[row, 1]) for row in (0, 1)} - {-1}
        if len(harness.plans) > 1:
            assert len(tails) == 2, "twins share the page that both still write to"
        assert harness.scheduler.stats().cached_pages <= 1
    harness.finish()
    stats = harness.scheduler.stats()
    assert (stats.cached_pages, stats.free_pages) == (1, 7)
    assert len(harness.free_pages()) == 7
    harness.run(make_request(3, prompt, max_tokens=20))  # 39 stored: the second page is full now, the third is a tail
    assert (harness.scheduler.stats().cached_pages, len(harness.free_pages())) == (2, 6)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [3, 64])
def test_r5_max_tokens_is_exact_and_bad_lengths_are_refused(depth: int, budget: int) -> None:
    for max_tokens in (0, 1, 2, 3, 7):
        harness = Harness(make_config(overlap_depth=depth, max_step_tokens=budget))
        (tokens,) = harness.run(make_request(1, range(10, 16), max_tokens=max_tokens))
        assert len(tokens) == max_tokens
        assert harness.streams[1].finish == FinishReason.LENGTH
        plans = plans_of(harness)
        assert sum(plan.num_samples for plan in plans) == max_tokens
        assert sum(plan.num_tokens for plan in plans) == 6 + max(max_tokens - 1, 0), "a finish by length wastes no step"
    config = make_config(max_seq_len=16, num_pages=4, page_size=4)
    harness = Harness(config)
    (tokens,) = harness.run(make_request(2, range(10, 25), max_tokens=1))
    assert len(tokens) == 1
    with pytest.raises(ValidationError):
        SamplingParams(max_tokens=-1)
    too_long = (make_request(4, range(16), max_tokens=0), make_request(5, range(200)))
    for bad in (make_request(3, []), *too_long, make_request(6, range(8), max_tokens=9)):
        with pytest.raises(InvalidRequest):
            harness.scheduler.validate(bad)
        with pytest.raises(InvalidRequest):
            harness.scheduler.add(bad)
    assert not harness.scheduler.has_work


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_r6_tokens_after_eos_are_dropped_not_sent_not_inserted(depth: int) -> None:
    prompt = list(range(10, 15))
    model, expected = stops_after(prompt, 6)
    harness = Harness(make_config(page_size=1, eos_token_ids=(EOS,), overlap_depth=depth), model)
    assert harness.run(make_request(1, prompt, max_tokens=30)) == [expected]  # the harness refuses later tokens
    assert harness.streams[1].finish == FinishReason.STOP
    assert sum(plan.num_samples for plan in plans_of(harness)) == len(expected) + depth - 1
    wasted, _ = run_alone(make_request(0, [*prompt, *expected], max_tokens=3), model, harness.config)
    assert harness.scheduler.stats().cached_pages <= len(prompt) + len(expected)
    harness.run(make_request(2, [*prompt, *expected, *wasted], max_tokens=1))
    assert harness.streams[2].cached_tokens <= len(prompt) + len(expected)


def abort_queued(harness: Harness) -> None:
    harness.add(make_request(9, range(50, 60)))


def abort_mid_chunk(harness: Harness) -> None:
    harness.add(make_request(9, range(50, 80)))
    harness.plan()
    harness.deliver()


def abort_planned(harness: Harness) -> None:
    harness.add(make_request(9, range(50, 56), max_tokens=20))
    for _ in range(3):
        harness.step()
    while harness.plan() is not None:
        pass


def abort_finishing(harness: Harness) -> None:
    """The step with its last token is planned and has not returned."""
    harness.add(make_request(9, range(50, 56), max_tokens=1))
    while harness.plan() is not None:
        pass


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("moment", [abort_queued, abort_mid_chunk, abort_planned, abort_finishing])
@pytest.mark.parametrize("company", [False, True])
def test_r7_abort_gives_rows_and_pages_back_once_and_not_too_early(
    depth: int, moment: Callable[[Harness], None], company: bool
) -> None:
    harness = Harness(
        make_config(page_size=4, num_pages=24, max_running_requests=2, max_step_tokens=8, overlap_depth=depth)
    )
    if company:
        harness.add(make_request(1, range(100, 110), max_tokens=25))
        harness.step()
    moment(harness)
    assert harness.abort(9)
    in_flight = {page for _, _, pages in harness.in_flight for page in pages}
    assert not harness.free_pages() & in_flight
    harness.abort(9)
    harness.add(make_request(10, range(70, 82), max_tokens=10))  # wants the row and the pages
    harness.finish()
    assert not harness.abort(9)
    assert harness.streams[9].finish == FinishReason.ABORT
    assert harness.streams[9].tokens == [] or moment is abort_planned
    assert len(harness.scheduler.cache.free_slots) == len(harness.free_pages())


DETERMINISM = """
import sys
sys.path.insert(0, {root!r})
from tests.unit.test_rules import POLICIES, busy_run
print([busy_run(policy) for policy in POLICIES])
"""


def busy_run(policy: str = "fcfs") -> str:
    """Digest of every plan of a run with arrivals, users, aborts, preemptions and twins."""
    harness = Harness(make_config(page_size=2, num_pages=24, max_running_requests=6, max_step_tokens=12, policy=policy))
    for i in range(40):
        prompt = range(10 + 7 * (i % 5), 20 + 7 * (i % 5) + i % 3)
        harness.add(
            make_request(
                1000 - 13 * i, prompt, max_tokens=3 + i % 9, request_user=f"user{i % 4}", request_priority=i % 3
            )
        )
        if i % 6 == 5:
            harness.abort(1000 - 13 * (i - 1))
        harness.step()
    harness.finish()
    assert harness.scheduler.stats().preemptions > 0
    return hashlib.sha256(b"".join(buffer.tobytes() for buffer in harness.plans)).hexdigest()


def test_r8_the_same_events_give_the_same_plans_in_every_process() -> None:
    root = str(Path(__file__).parents[2])
    runs = [
        subprocess.run(
            [sys.executable, "-c", DETERMINISM.format(root=root)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]  # fmt: skip
    assert runs == [str([busy_run(policy) for policy in POLICIES])] * 2


@pytest.mark.parametrize(("max_seq_len", "page_size"), [(17, 16), (20, 16), (31, 16), (32, 16), (10, 3), (7, 1)])
def test_r9_the_last_page_has_columns_for_max_seq_len(max_seq_len: int, page_size: int) -> None:
    harness = Harness(make_config(max_seq_len=max_seq_len, page_size=page_size, num_pages=40))
    prompts = {1: [10, 11], 2: range(20, 20 + max_seq_len - 1), 3: range(60, 60 + max_seq_len // 2)}
    harness.run(*(make_request(i, prompt, max_tokens=max_seq_len - len(prompt)) for i, prompt in prompts.items()))
    for i, prompt in prompts.items():
        assert len(prompt) + len(harness.streams[i].tokens) == max_seq_len
    assert max(int(plan.device_len.max()) for plan in plans_of(harness)) == max_seq_len - 1


def leak_a_page(harness: Harness, row: int, other: int) -> None:
    harness.scheduler.cache.allocator.allocate(1)


def free_a_private_page(harness: Harness, row: int, other: int) -> None:
    harness.scheduler.cache.allocator.free(harness.scheduler.rows.page_table[row, 2:3])


def free_a_shared_page(harness: Harness, row: int, other: int) -> None:
    harness.scheduler.cache.allocator.free(harness.scheduler.rows.page_table[row, 0:1])


def point_at_a_free_page(harness: Harness, row: int, other: int) -> None:
    harness.scheduler.rows.page_table[row, 2] = harness.scheduler.cache.free_slots[0]


def point_at_another_rows_page(harness: Harness, row: int, other: int) -> None:
    harness.scheduler.rows.page_table[row, 2] = harness.scheduler.rows.page_table[other, 2]


def point_a_shared_position_elsewhere(harness: Harness, row: int, other: int) -> None:
    harness.scheduler.rows.page_table[row, 0] = harness.scheduler.rows.page_table[row, 1]


def quarantine_a_free_page(harness: Harness, row: int, other: int) -> None:
    harness.scheduler.cache.quarantine(harness.scheduler.cache.free_slots[:1], 10**6)


def forget_a_lock(harness: Harness, row: int, other: int) -> None:
    cache = harness.scheduler.cache
    cache.unlock(cache.prefix_cache.match_prefix(harness.scheduler.rows.tokens[row, :8]).handle)


@pytest.mark.parametrize(
    "damage",
    [
        leak_a_page, free_a_private_page, free_a_shared_page, point_at_a_free_page, point_at_another_rows_page,
        point_a_shared_position_elsewhere, quarantine_a_free_page, forget_a_lock,
    ],
)  # fmt: skip
def test_r10_the_checker_finds_every_kind_of_wrong_page(damage: Callable[[Harness, int, int], None]) -> None:
    """Two rows of ten prompt tokens at page 4: two shared pages in the tree each and a private third."""
    harness = Harness(make_config(page_size=4, num_pages=20))
    harness.add(make_request(1, range(10, 20), max_tokens=9), make_request(2, range(30, 40), max_tokens=9))
    harness.step()
    row, other = plans_of(harness)[0].rows[:2].tolist()
    harness.scheduler.check_integrity()
    damage(harness, row, other)
    with pytest.raises(IntegrityError):
        harness.scheduler.check_integrity()


def test_r10_holds_after_every_step_of_a_busy_run() -> None:
    """Every page in one place at every moment (the harness asks the checker after every event)."""
    assert busy_run() != busy_run("fair_share")


@pytest.mark.parametrize("budget", [1, 3, 5, 7])
def test_r11_chunks_end_anywhere_but_only_full_pages_are_shared(budget: int) -> None:
    harness = Harness(make_config(page_size=4, max_step_tokens=budget, overlap_depth=1))
    prompt = list(range(10, 33))
    harness.add(make_request(1, prompt, max_tokens=2))
    ends = []
    while len(ends) < 3:
        plan = harness.plan()
        assert plan is not None
        ends.append(int(plan.device_len[0]))
        assert cached_slots(harness) == ends[-1] // 4 * 4
        harness.deliver()
    harness.add(make_request(2, prompt, max_tokens=2))
    harness.finish()
    assert harness.prefilled_tokens == 23 + 3
    assert budget > 4 or any(end % 4 for end in ends), "a budget below a page must cut pages"


def admissions(plans: list[StepPlan]) -> list[tuple[int, int, int]]:
    """(seed, prompt_len, first token) of every sampling entry in order: who got a row, and with what."""
    seen = []
    for plan in plans:
        firsts = {row: plan.run_tokens[at] for (row, _, count), at in zip(
            plan.token_runs.tolist(), np.cumsum([0, *plan.token_runs[:, 2]]).tolist(), strict=False)}  # fmt: skip
        for entry in plan.sampling:
            seed = int(entry[S.SEED_LOW : S.SEED_HIGH + 1].copy().view(np.uint64)[0])
            seen.append((seed, int(entry[S.PROMPT_LEN]), int(firsts.get(int(entry[S.ROW]), -1))))
    return seen


def test_r12_preempted_and_recovered_requests_keep_seed_position_and_place() -> None:
    """Sampled outputs depend on seed, prompt_len and position, so equality with the run alone shows that they were
    kept (`finish` compares); the admission order shows the place in line."""
    config = make_config(page_size=1, num_pages=40, max_running_requests=4, max_step_tokens=16)
    requests = [
        make_request(i, range(100 * i, 100 * i + 8), max_tokens=20, temperature=1.0, seed=2**63 + i)
        for i in range(1, 6)
    ]
    harness = Harness(config)
    harness.add(*requests[:4])
    while harness.scheduler.stats().preemptions == 0:
        assert harness.step(), "the pool was never short of pages"
    harness.add(requests[4])
    harness.finish()
    order = admissions(plans_of(harness))
    again = [entry[0] - 2**63 for entry in order[4:]]
    assert 5 in again and again.index(5) == len(again) - 1, f"request 5 came last but was placed before others: {again}"
    assert {entry[1] for entry in order} == {8}

    harness = Harness(make_config(page_size=4, num_pages=60, max_running_requests=3, max_step_tokens=16))
    harness.add(*requests)
    for _ in range(7):
        harness.step()
    harness.plan()
    harness.plans.clear()
    harness.recover()
    harness.finish()
    order = admissions(plans_of(harness))
    assert [(seed - 2**63, prompt_len) for seed, prompt_len, _ in order] == [(i, 8) for i in range(1, 6)]


def test_r12_a_request_resumed_elsewhere_goes_on_where_it_stopped() -> None:
    """Another replica gets prompt + tokens so far and the original prompt_len: limits count from there."""
    config = make_config(max_seq_len=64)
    whole = make_request(1, range(10, 20), max_tokens=12, min_tokens=9, temperature=1.0, seed=5)
    (tokens,) = Harness(config).run(whole)
    assert len(tokens) == 12
    for done in (1, 4, 11):
        resumed = Request(2, np.array([*range(10, 20), *tokens[:done]], dtype=np.int32), whole.sampling, prompt_len=10)
        assert Harness(config).run(resumed) == [tokens[done:]]


def test_r13_every_eos_stops_and_ignore_eos_and_min_tokens_hold() -> None:
    eos = (3, 5)
    config = make_config(eos_token_ids=eos, max_seq_len=64)
    model = FakeModel(vocab_size=12, eos_token_id=5, eos_probability=0.1)
    requests, met = [], set()
    for i in range(60):
        options = [{}, {"min_tokens": 6}, {"ignore_eos": True}, {"stop_token_ids": [7], "min_tokens": 3}][i % 4]
        requests.append(make_request(i, [20 + i], max_tokens=12, **options))
    harness = Harness(config, model)
    for request, tokens in zip(requests, harness.run(*requests), strict=True):
        params, finish = request.sampling, harness.streams[request.request_id].finish
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        places = [i for i, token in enumerate(tokens) if token in stops]
        assert places == ([len(tokens) - 1] if finish == FinishReason.STOP else [])
        assert all(place >= params.min_tokens for place in places)
        if params.ignore_eos:
            assert len(tokens) == 12
        met.update(tokens[place] for place in places)
    assert met == {3, 5, 7}, "every kind of stop should have been met"


def test_r14_memory_is_settled_before_the_first_row_is_placed() -> None:
    """Pool exactly full, both rows cross a page in the same step: one must go before the step is laid out. A row that
    is in a plan keeps its pages for that plan (the worker reads each row's prefix after all stores of the step)."""
    harness = Harness(
        make_config(page_size=2, num_pages=6, max_running_requests=3, overlap_depth=2, max_step_tokens=32)
    )
    harness.add(*(make_request(i, range(100 * i, 100 * i + 4), max_tokens=6) for i in (1, 2, 3)))
    harness.finish()
    assert harness.scheduler.stats().preemptions > 0
    owner_changes = 0
    for plan in plans_of(harness):
        assert len(set(plan.page_deltas[:, 2].tolist())) == len({(r, s) for r, _, s in plan.page_deltas.tolist()})
        assert set(plan.page_deltas[:, 0].tolist()) <= set(plan.rows[: plan.num_rows].tolist()), (
            "a removed row left traces"
        )
        assert {int(entry[S.ROW]) for entry in plan.sampling} <= set(plan.rows[: plan.num_rows].tolist())
        owner_changes += len(plan.sampling)
    assert owner_changes > 3


@pytest.mark.parametrize("depth", [1, 2])
def test_r14_a_placed_chunk_is_not_preempted_by_the_decodes_of_its_step(depth: int) -> None:
    """A long prompt takes page after page while two rows decode: whoever is short, no row loses a step it is in."""
    for pages in range(8, 20):
        config = make_config(
            page_size=2, num_pages=pages, max_running_requests=3, overlap_depth=depth, max_step_tokens=6
        )
        harness = Harness(config)
        harness.add(*(make_request(i, range(100 * i, 100 * i + 3 + i), max_tokens=9) for i in (1, 2)))
        harness.step()
        harness.add(make_request(3, range(300, 316), max_tokens=1))
        harness.finish()


def test_r14_pages_freed_by_a_plan_are_not_handed_out_in_it() -> None:
    """Two decodes take the whole budget, so the third row, in mid-prefill, is in no plan in flight when it is
    preempted: its page could be free at once, but only the next plan may use it (the harness compares)."""
    for pages in (10, 11, 12, 13):
        harness = Harness(make_config(page_size=2, num_pages=pages, max_step_tokens=2, policy="priority"))
        harness.add(make_request(1, [100], max_tokens=2 * pages - 2, request_priority=1))
        harness.step()
        harness.add(make_request(3, range(300, 305), max_tokens=1))
        harness.step()
        harness.add(make_request(2, [200], max_tokens=2 * pages - 2, request_priority=1))
        harness.finish()
        assert harness.scheduler.stats().preemptions > 1


def test_r14_pages_inserted_by_a_step_are_not_evicted_while_it_is_planned() -> None:
    """The second prompt of the same step needs more than is free: it may not take what the first has just inserted."""
    for pages in range(5, 12):
        harness = Harness(make_config(page_size=2, num_pages=pages, max_running_requests=4, max_step_tokens=64))
        harness.add(
            make_request(1, range(10, 18), max_tokens=0),
            make_request(2, range(30, 38), max_tokens=0),
            make_request(3, range(10, 18), max_tokens=2),
        )
        harness.finish()
