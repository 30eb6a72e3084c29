"""64 copies of one prompt on real ranks prefill exactly what the formula says, and all give the same tokens.

CI takes a tiny checkpoint at TP 2; SmolLM2 by hand: `pytest -m full_grid -s` on this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cluster.model_files import resolve_model
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from tests.checkpoints import load_reference, make_checkpoint
from tests.integration.shared_group import SharedGroups, shared_groups
from tests.references import GreedyJudge
from tests.unit.test_twins import CASES, TWINS, formula

pytestmark = pytest.mark.usefixtures("private_ray")

TIE = 1e-4
OUTPUT = 3
SETTINGS = [
    (page_size, length, budget, gap) for length, page_size, _ in CASES for budget in (512, 8192) for gap in (0, 1)
]
# Sorted by page size, which the ranks depend on.
SETTINGS.sort()


@pytest.fixture(scope="module")
def groups(private_ray: None) -> Iterator[SharedGroups]:
    with shared_groups() as groups:
        yield groups


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("twins"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def tiny_judge(tiny: Path) -> GreedyJudge:
    return GreedyJudge(load_reference(tiny), TIE)


def check(groups, model: Path, judge, vocab: int, tp: int, page_size: int, length: int, budget: int, gap: int) -> None:
    pages = -(-(length + 16) // page_size) + TWINS * (32 // page_size + 2)
    group = groups.get(
        model, tp_size=tp, page_size=page_size, max_seq_len=2048, max_running_requests=TWINS, max_step_tokens=8192,
        num_pages=pages,
    )  # fmt: skip
    prompt = np.random.default_rng(length).integers(3, vocab, length)
    greedy = SamplingParams(temperature=0.0, max_tokens=OUTPUT, seed=0, ignore_eos=True)
    served = group.serve([Request(n, prompt, greedy) for n in range(TWINS)], gap, max_step_tokens=budget)
    assert served.stats.prefilled_tokens == formula(length, page_size) and served.stats.preemptions == 0
    shared = (length - 1) // page_size * page_size
    assert sorted(served.cached_tokens.values()) == [0] + [shared] * (TWINS - 1)
    for tokens in served.tokens.values():
        assert len(tokens) == OUTPUT
        judge.check(prompt.tolist(), tokens)


@pytest.mark.parametrize(("page_size", "length", "budget", "gap"), SETTINGS)
def test_64_twins(groups, tiny, tiny_judge, page_size: int, length: int, budget: int, gap: int) -> None:
    check(groups, tiny, tiny_judge, 101, 2, page_size, length, budget, gap)


@pytest.mark.full_grid
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("page_size", "length", "budget", "gap"), SETTINGS)
def test_64_twins_of_smollm2(groups, page_size: int, length: int, budget: int, gap: int) -> None:
    path = resolve_model(None)
    check(groups, path, GreedyJudge(load_reference(path), TIE), 49000, 1, page_size, length, budget, gap)
