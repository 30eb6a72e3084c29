"""SmolLM2's greedy tokens are transformers', whatever the TP size, cache, page size, step budget or overlap.

CI runs settings that cover every pair of values; all of them run by hand: `pytest -m full_grid -s` on this file.
Schedulers change over ranks that stay; the way through `LLM` is in test_llm.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from cluster.model_files import resolve_model
from cluster.tokenizer import Tokenizer
from scheduler.outputs import FinishReason
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from tests.integration.shared_group import SharedGroups, shared_groups
from tests.references import GreedyJudge

pytestmark = pytest.mark.usefixtures("private_ray")

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "1, 2, 3, 4,",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "In a distant future, people live on Mars. They",
    "Q: What is the largest planet of the solar system?\nA:",
]
TOKENS = 64
TIE = 1e-4

# (tp, page size, cache, step budget, overlap): test_llm has TP 1; the grid has all combinations.
FEW = [
    (3, 16, "radix", 512, 2),
]
GRID = list(itertools.product((1, 3), (1, 4, 16), ("radix", "naive"), (7, 64, 512), (1, 2)))


@pytest.fixture(scope="module")
def groups(private_ray: None) -> Iterator[SharedGroups]:
    with shared_groups() as groups:
        yield groups


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer(resolve_model(None))
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def judge() -> Iterator[GreedyJudge]:
    import torch

    from tests.checkpoints import load_reference

    torch.set_num_threads(1)
    judge = GreedyJudge(load_reference(resolve_model(None)), TIE)
    yield judge
    print(f"\n{judge.outputs} outputs of {TOKENS} tokens checked, {judge.with_ties} of them with ties within {TIE}")


def check(groups, prompts, judge, tp: int, page_size: int, cache: str, budget: int, overlap: int) -> None:
    group = groups.get(
        resolve_model(None), tp_size=tp, page_size=page_size, max_seq_len=256, max_running_requests=8,
        max_step_tokens=512, num_pages=2048 // page_size,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, seed=0, ignore_eos=True)
    requests = [Request(number, np.array(prompt), greedy) for number, prompt in enumerate(prompts)]
    served = group.serve(requests, cache_type=cache, max_step_tokens=budget, overlap_depth=overlap)
    for number, prompt in enumerate(prompts):
        assert served.finish[number] == FinishReason.LENGTH and len(served.tokens[number]) == TOKENS
        judge.check(prompt, served.tokens[number])


@pytest.mark.parametrize(("tp", "page_size", "cache", "budget", "overlap"), FEW)
def test_a_few_settings(groups, prompts, judge, tp, page_size, cache, budget, overlap) -> None:
    check(groups, prompts, judge, tp, page_size, cache, budget, overlap)


@pytest.mark.full_grid
@pytest.mark.parametrize(("tp", "page_size", "cache", "budget", "overlap"), GRID)
def test_full_grid(groups, prompts, judge, tp, page_size, cache, budget, overlap) -> None:
    check(groups, prompts, judge, tp, page_size, cache, budget, overlap)
