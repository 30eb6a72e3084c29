"""What the tests of DESIGN's rules share: models that stop on cue, and a look at what the scheduler did."""

from __future__ import annotations

import hashlib

import numpy as np

from scheduler.fake_model import FakeModel, content_sums
from scheduler.step import StepPlan
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
