"""How long a step may take: by its work, by what steps took before, and if its kernels are new."""

from __future__ import annotations

import pytest

from cluster.watchdog import Watchdog
from scheduler.step import StepPlan, StepPlanWriter


def plan(step_id: int, tokens: int, context: int = 0, decodes: int = 0) -> StepPlan:
    """`decodes` rows of one token, and one of `tokens`, all after `context` cached ones."""
    extend = [1] * decodes + [tokens] * bool(tokens)
    result = StepPlanWriter(1).begin(
        step_id=step_id, num_rows=len(extend), num_decode=decodes, num_samples=len(extend), num_tokens=sum(extend)
    )
    result.cached_len[:] = context
    result.device_len[:] = [context + new for new in extend]
    return result


def allowed(watchdog: Watchdog, step: StepPlan) -> float:
    watchdog.sent(step, 0.0)
    seconds = watchdog.allowed()
    watchdog.in_flight.clear()
    return seconds


def run(watchdog: Watchdog, step: StepPlan, seconds: float) -> None:
    watchdog.sent(step, 100.0)
    assert watchdog.answered(100.0 + seconds, 0.0) == pytest.approx(seconds)


def test_a_decode_step_has_about_the_step_timeout() -> None:
    watchdog = Watchdog(60.0)
    run(watchdog, plan(1, 0, 500, 64), 0.02)
    run(watchdog, plan(2, 0, 500, 64), 0.02)
    assert 60 < allowed(watchdog, plan(3, 0, 501, 64)) < 61


def test_long_prompts_and_long_contexts_have_more() -> None:
    watchdog = Watchdog(1.0)
    assert allowed(watchdog, plan(1, 2048)) > 100  # nothing is known of these ranks
    for step_id in (1, 2, 3):
        run(watchdog, plan(step_id, 128), 1.28)  # 10 ms a token
    short, long, far = (allowed(watchdog, plan(9, *size)) for size in ((128,), (2048,), (2048, 16384)))
    assert short == pytest.approx(1 + 10 * 1.28, rel=0.1)
    assert long > 1 + 10 * 20
    assert far > 3 * long


def test_the_first_step_of_a_kind_on_new_ranks_may_compile() -> None:
    watchdog = Watchdog(1.0, compile_timeout=120.0)
    assert allowed(watchdog, plan(1, 0, 10, 4)) > 120
    run(watchdog, plan(1, 0, 10, 4), 30.0)
    assert allowed(watchdog, plan(2, 0, 11, 4)) < 2
    assert allowed(watchdog, plan(3, 64, 0, 4)) > 120
    watchdog.forget()
    assert allowed(watchdog, plan(4, 0, 11, 4)) > 120


def test_compiling_says_nothing_of_the_pace() -> None:
    watchdog = Watchdog(1.0, compile_timeout=120.0)
    run(watchdog, plan(1, 256), 100.0)
    run(watchdog, plan(2, 256), 0.1)
    assert allowed(watchdog, plan(3, 256)) < 3


def test_a_step_that_waited_for_the_one_before_counts_from_its_answer() -> None:
    watchdog = Watchdog(1.0)
    watchdog.sent(plan(1, 64), 10.0)
    watchdog.sent(plan(2, 64), 10.0)
    assert watchdog.answered(15.0, 9.0) == pytest.approx(5.0)
    assert watchdog.answered(16.0, 15.0) == pytest.approx(1.0)


def test_what_a_long_step_should_take_is_known_while_it_runs() -> None:
    watchdog = Watchdog(60.0)
    for step_id in (1, 2):
        run(watchdog, plan(step_id, 128), 1.28)
    assert watchdog.expected == 0
    watchdog.sent(plan(3, 2048), 200.0)
    watchdog.sent(plan(4, 128), 200.0)
    assert watchdog.expected == pytest.approx(20.48, rel=0.6)  # more, since it attends to more
    watchdog.answered(220.0, 200.0)
    assert watchdog.expected < 2
    watchdog.forget()
    assert watchdog.expected == 0
