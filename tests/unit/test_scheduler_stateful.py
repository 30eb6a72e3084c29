"""The scheduler under anything: the fake worker checks every step, every output equals the request run alone.

CI runs a few hundred fixed examples; the long run is by hand, in parts: `pytest -n 2 -m full_grid` on this file.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from scheduler.config import SchedulerConfig
from scheduler.fake_model import FakeModel
from scheduler.request import InvalidRequest
from tests.unit.scheduler_harness import Harness, make_config, make_request
from tests.unit.toy_constraint import ToyConstraint

EOS = (3, 5)
POLICIES = ("fcfs", "longest_prefix", "priority", "fair_share")
CI = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
FULL = settings(CI, max_examples=500, derandomize=False, print_blob=True)  # times 20 parts, each from its own seed


@st.composite
def configs(draw: st.DrawFn) -> dict[str, object]:
    page_size = draw(st.sampled_from([1, 3, 16]))
    slots = draw(st.integers(4, 160))
    return {
        "page_size": page_size,
        "num_pages": max(2, slots // page_size),
        "max_running_requests": draw(st.integers(1, 6)),
        "max_seq_len": draw(st.integers(8, 120)),
        "max_step_tokens": draw(st.one_of(st.integers(1, 8), st.integers(1, 64), st.just(512))),
        "cache_type": draw(st.sampled_from(["radix", "radix", "radix", "naive"])),
        "overlap_depth": draw(st.integers(1, 3)),
        "eos_token_ids": EOS,
        "pad_sizes": draw(st.sampled_from([(), (1, 2, 4, 8)])),
        "policy": draw(st.sampled_from(("fcfs", *POLICIES))),
    }


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """A prefix that many prompts share, then tokens of its own; short enough to fit most pools."""
    family = draw(st.integers(0, 2))
    shared = [100 * (family + 1) + i for i in range(draw(st.integers(0, 50)))]
    own = draw(st.lists(st.integers(10, 13), max_size=12))
    return shared + own


def samplings() -> st.SearchStrategy[dict[str, object]]:
    def min_below_max(sampling: dict[str, object]) -> dict[str, object]:
        return sampling | {"min_tokens": min(sampling.get("min_tokens", 0), sampling["max_tokens"])}

    return st.fixed_dictionaries(
        {"max_tokens": st.one_of(st.integers(0, 4), st.integers(0, 40))},
        optional={
            "temperature": st.sampled_from([0.0, 0.7, 1.5]),
            "seed": st.integers(0, 2**64 - 1),
            "min_tokens": st.integers(0, 10),
            "ignore_eos": st.booleans(),
            "stop_token_ids": st.lists(st.integers(0, 40), max_size=3),
            "request_priority": st.integers(0, 2),
            "request_user": st.sampled_from(["ann", "bob", None]),
            "logprobs": st.integers(0, 3),
            "prompt_logprobs": st.integers(0, 2),
            "frequency_penalty": st.sampled_from([0.0, 0.5]),
            "repetition_penalty": st.sampled_from([1.0, 1.2]),
            "logit_bias": st.dictionaries(st.integers(0, 40), st.floats(-100, 100), max_size=3),
            "request_constraint": st.builds(ToyConstraint, st.just(50), st.integers(1, 20), st.integers(0, 20)),
        },
    ).map(min_below_max)


class SchedulerMachine(RuleBasedStateMachine):
    """Events in any order: arrivals, twins, aborts, plans, results late and in bursts, crashes of the workers."""

    @initialize(
        config=configs(), late=st.booleans(), vocab=st.sampled_from([50, 1000]), eos=st.sampled_from([0.0, 0.03, 0.2])
    )
    def start(self, config: dict[str, object], late: bool, vocab: int, eos: float) -> None:
        model = FakeModel(vocab_size=vocab, eos_token_id=EOS[0], eos_probability=eos)
        self.harness = Harness(make_config(**config), model, late=late)
        self.next_id = 1

    def _add(self, prompt: list[int], sampling: dict[str, object], copies: int) -> None:
        for _ in range(copies):
            try:
                self.harness.add(make_request(self.next_id, prompt, **sampling))
            except InvalidRequest:
                self._check_refusal(len(prompt), sampling["max_tokens"])
                return
            self.next_id += 1

    def _check_refusal(self, prompt_len: int, max_tokens: int) -> None:
        config = self.harness.config
        fits = prompt_len <= config.num_pages * config.page_size
        fits &= prompt_len + max(max_tokens, 1) <= config.max_seq_len
        assert not prompt_len or not fits, f"a prompt of {prompt_len} tokens with max_tokens {max_tokens} was refused"

    @rule(prompt=prompts(), sampling=samplings())
    def add(self, prompt: list[int], sampling: dict[str, object]) -> None:
        self._add(prompt, sampling, 1)

    @rule(prompt=prompts(), sampling=samplings(), copies=st.integers(2, 5))
    def add_twins(self, prompt: list[int], sampling: dict[str, object], copies: int) -> None:
        self._add(prompt, sampling, copies)

    @precondition(lambda self: self.next_id > 1)
    @rule(data=st.data(), turns=st.integers(1, 30))
    def add_next_turn(self, data: st.DataObject, turns: int) -> None:
        """A chat's next turn, possibly while the last one still runs: prompt and output so far, then more."""
        stream = self.harness.streams[data.draw(st.integers(1, self.next_id - 1))]
        self._add([*stream.request.prompt_ids.tolist(), *stream.tokens, turns], {"max_tokens": turns}, 1)

    @precondition(lambda self: self.next_id > 1)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.abort(data.draw(st.integers(1, self.next_id)))

    @rule()
    def plan(self) -> None:
        self.harness.plan()

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def deliver(self) -> None:
        self.harness.deliver()

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def deliver_burst(self) -> None:
        while self.harness.deliver():
            pass

    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()

    @precondition(lambda self: self.harness.scheduler.stats().running)
    @rule()
    def recover(self) -> None:
        self.harness.recover()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.finish()


def test_any_order_of_events() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=CI)


@pytest.mark.full_grid
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(20))
def test_any_order_of_events_10_000_examples(part: int) -> None:
    machine = seed(part)(type("Part", (SchedulerMachine,), {}))
    run_state_machine_as_test(machine, settings=FULL)


def random_trace(seed: int, make_harness: Callable[[SchedulerConfig], Harness] | None = None) -> Harness:
    """One long run of a busy little server; all of it follows from the seed. By default on the fake worker."""
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 3, 16]))
    pool = int(rng.integers(24, 120))
    config = make_config(
        page_size=page_size,
        num_pages=max(3, pool // page_size),
        max_running_requests=int(rng.integers(1, 9)),
        max_seq_len=int(rng.integers(20, 100)),
        max_step_tokens=int(rng.choice([1, 2, 3, 7, 16, 33, 64])),
        overlap_depth=int(rng.integers(1, 4)),
        eos_token_ids=EOS,
        cache_type="naive" if rng.random() < 0.15 else "radix",
        pad_sizes=(1, 2, 4, 8) if rng.random() < 0.5 else (),
        policy=str(rng.choice(POLICIES)),
    )
    model = FakeModel(vocab_size=400, eos_token_id=EOS[0], eos_probability=float(rng.choice([0, 0.02, 0.1])))
    late = bool(rng.random() < 0.5)
    harness = make_harness(config) if make_harness else Harness(config, model, late=late)
    room = min(config.max_seq_len - 1, config.num_pages * page_size)
    families = [rng.integers(10, 400, 60) for _ in range(3)]
    next_id = 1
    crash = rng.random() < 0.3
    for _ in range(int(rng.integers(40, 160))):
        event = rng.random()
        if event < 0.25:
            prompt = np.concatenate(
                (families[rng.integers(3)][: rng.integers(0, 50)], rng.integers(10, 14, rng.integers(1, 8)))
            )[:room]
            max_tokens = int(rng.integers(0, min(30, config.max_seq_len - len(prompt)) + 1))
            sampling = {
                "temperature": float(rng.choice([0, 1])), "seed": int(rng.integers(2**63)),
                "ignore_eos": bool(rng.random() < 0.2), "request_priority": int(rng.integers(3)),
                "request_user": str(rng.choice(["ann", "bob", "cy"])),
                "min_tokens": min(int(rng.integers(0, 6)), max_tokens), "max_tokens": max_tokens,
            }  # fmt: skip
            if rng.random() < 0.3:
                sampling |= {
                    "logprobs": int(rng.integers(3)), "prompt_logprobs": int(rng.integers(2)),
                    "presence_penalty": float(rng.choice([0, 1])), "repetition_penalty": float(rng.choice([1, 2])),
                }  # fmt: skip
            if rng.random() < 0.3:
                sampling["request_constraint"] = ToyConstraint(
                    400, int(rng.integers(1, 20)), int(rng.integers(0, 20)), EOS[0]
                )
            for _ in range(int(rng.choice([1, 1, 1, 3]))):
                harness.add(make_request(next_id, prompt, **sampling))
                next_id += 1
        elif event < 0.32 and next_id > 1:
            harness.abort(int(rng.integers(1, next_id)))
        elif event < 0.34 and crash:
            harness.recover()
        elif event < 0.6:
            harness.plan()
        elif event < 0.75:
            harness.deliver()
        elif event < 0.8:
            while harness.deliver():
                pass
        else:
            harness.step()
    harness.finish()
    return harness


@settings(CI, max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_random_traces(seed: int) -> None:
    random_trace(seed)


@pytest.mark.full_grid
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(20))
def test_random_traces_10_000_examples(part: int) -> None:
    for trace_seed in np.random.default_rng(part).integers(2**32, size=500).tolist():
        random_trace(trace_seed)


def test_the_random_traces_meet_what_they_are_for() -> None:
    """A trace generator that never preempts or hits the cache would prove nothing."""
    seen = [random_trace(seed).scheduler.stats() for seed in range(6)]
    assert sum(stats.preemptions for stats in seen) > 0
    assert sum(stats.cached_tokens for stats in seen) > 0
