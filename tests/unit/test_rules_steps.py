"""DESIGN's rules about how steps are laid out and requests placed in them (R8, R9, R12, R14): one test each, which
fails when the rule is broken.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scheduler.request import Request
from scheduler.step import S, StepPlan
from tests.unit.rule_helpers import POLICIES, busy_run, plans_of
from tests.unit.scheduler_harness import Harness, make_config, make_request

DETERMINISM = """
import sys
sys.path.insert(0, {root!r})
from tests.unit.rule_helpers import POLICIES, busy_run
print([busy_run(policy) for policy in POLICIES])
"""


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
