"""The scheduler's random traces on real ranks at TP 2: every output is what the request gives alone at TP 1.

Tiny pools, preemption, aborts, twins, budgets 1 to 64, results late and in bursts, recovery. Many of them by hand:
`pytest -m full_grid -s` on this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from scheduler.config import SchedulerConfig
from tests.alone import Alone
from tests.checkpoints import make_checkpoint
from tests.integration.real_harness import RealHarness
from tests.integration.shared_group import SharedGroups, shared_groups
from tests.unit.test_scheduler_stateful import EOS, random_trace

pytestmark = pytest.mark.usefixtures("private_ray")

MAX_SEQ_LEN = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary for the traces' prompts, which two ranks do not divide, and ends of sequence that do come up."""
    path = make_checkpoint("llama", tmp_path_factory.mktemp("traces"), vocab_size=401)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][list(EOS)] *= 2.0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Alone]:
    alone = Alone(model, MAX_SEQ_LEN, EOS)
    yield alone
    print(f"\n{alone.compared}")


@pytest.fixture(scope="module")
def groups(private_ray: None) -> Iterator[SharedGroups]:
    with shared_groups() as groups:
        yield groups


def run_trace(seed: int, groups: SharedGroups, model: Path, alone: Alone) -> RealHarness:
    def make_harness(config: SchedulerConfig) -> RealHarness:
        group = groups.get(
            model, tp_size=2, page_size=config.page_size, max_seq_len=MAX_SEQ_LEN, max_running_requests=8,
            max_step_tokens=64, num_pages=128,
        )  # fmt: skip
        return RealHarness(group, alone, config)

    return random_trace(seed, make_harness)


def page_size(seed: int) -> int:
    """What `random_trace` draws first."""
    return int(np.random.default_rng(seed).choice([1, 3, 16]))


CI_SEEDS = (0,)
# Sorted by page size, which the ranks depend on.
MANY_SEEDS = sorted(range(1000, 1300), key=page_size)


@pytest.mark.parametrize("seed", CI_SEEDS)
def test_random_traces(seed: int, groups: SharedGroups, model: Path, alone: Alone) -> None:
    run_trace(seed, groups, model, alone)


@pytest.mark.full_grid
@pytest.mark.timeout(0)
def test_many_random_traces(groups: SharedGroups, model: Path, alone: Alone) -> None:
    stats = []
    for seed in MANY_SEEDS:
        try:
            stats.append(run_trace(seed, groups, model, alone).scheduler.stats())
        except BaseException as error:
            raise AssertionError(f"trace {seed}") from error
    preemptions, cached = sum(one.preemptions for one in stats), sum(one.cached_tokens for one in stats)
    print(f"\n{len(stats)} traces, {sum(one.steps for one in stats)} steps, {preemptions} preemptions, {cached} cached")
    assert preemptions > 0 and cached > 0
