"""`Sampler`: greedy, distribution, batch and TP independence, suppression, and the paths a step takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_sampler_filters import reference_kept
from thread_group import ThreadGroup, run_ranks

from scheduler.step import StepPlan, StepPlanWriter, pack_sampling
from tests.references import chi_square
from worker.parallel import TPGroup
from worker.sampling import Sampler
from worker.sampling.shard import UNUSABLE

torch.set_num_threads(1)
VOCAB = 384


def admission(params: list[dict], suppress: dict[int, tuple[int, list[int]]] | None = None) -> StepPlan:
    """A plan that only admits rows 0 .. n - 1 with these parameters."""
    suppress = suppress or {}
    ids = [i for _, many in suppress.values() for i in many]
    plan = StepPlanWriter(1).begin(
        step_id=1, num_rows=0, num_decode=0, num_samples=0, num_tokens=0, sampling=len(params),
        suppress_runs=len(suppress), suppress_ids=len(ids),
    )  # fmt: skip
    for row, given in enumerate(params):
        base = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": row, "prompt_len": 1}
        pack_sampling(plan.sampling[row], row=row, **(base | given))
    for index, (row, (until, many)) in enumerate(suppress.items()):
        plan.suppress_runs[index] = (row, until, len(many))
    plan.suppress_ids[:] = ids
    return plan.seal()


def make_sampler(plan: StepPlan, tp: TPGroup | ThreadGroup, num_rows: int, list_size: int = 64) -> Sampler:
    sampler = Sampler(num_rows, VOCAB, VOCAB // tp.size * tp.rank, tp, torch.device("cpu"), list_size)
    sections = [torch.from_numpy(s.copy()) for s in (plan.sampling, plan.suppress_runs, plan.suppress_ids)]
    sampler.state.apply(plan, *sections)
    return sampler


def sample(
    logits: np.ndarray, plan: StepPlan, rows: list[int], positions: list[int], tp_size: int = 1, list_size: int = 64
) -> list[int]:
    """Tokens of entries `rows`; every rank must agree."""

    def work(tp: ThreadGroup) -> list[int]:
        group = TPGroup.single() if tp.size == 1 else tp
        sampler = make_sampler(plan, group, len(plan.sampling), list_size)
        mode = sampler.state.mode(np.array(rows), np.array(positions))
        share = slice(VOCAB // tp.size * tp.rank, VOCAB // tp.size * (tp.rank + 1))
        local = torch.from_numpy(logits[:, share].copy())
        tokens = sampler.sample(local, torch.tensor(rows), torch.tensor(positions), mode)
        assert tokens.dtype == torch.int32
        return tokens.tolist()

    results = run_ranks(tp_size, work)
    assert all(result == results[0] for result in results)
    return results[0]


def random_logits(rows: int, spread: float = 2.0, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (rows, VOCAB)).astype(np.float32)


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_greedy_is_the_arg_max_and_the_lowest_id_among_equals(tp_size: int) -> None:
    logits = random_logits(4)
    logits[1, [3, 100, 300]] = 50.0
    logits[2, [250, 383]] = 50.0
    plan = admission([{"temperature": 0.0}] * 4)
    assert sample(logits, plan, [0, 1, 2, 3], [5] * 4, tp_size) == logits.argmax(1).tolist()
    # The same beside a sampled row, and with filters, which greedy ignores.
    plan = admission([{"temperature": 0.0}, {"temperature": 0.0, "top_p": 0.5}, {"temperature": 1e-40}, {}])
    assert sample(logits, plan, [0, 1, 2, 3], [5] * 4, tp_size)[:3] == logits.argmax(1)[:3].tolist()


MIXED = [
    {"temperature": 0.8, "seed": 2**64 - 1},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.5, "top_p": 0.95},  # beyond the list
    {"temperature": 0.3, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.01},
    {"temperature": 2.0, "top_k": 300, "top_p": 0.9, "min_p": 0.001},
    {"temperature": 1.0},
]


def test_same_tokens_alone_in_a_batch_and_at_any_tp() -> None:
    logits, plan = random_logits(8), admission(MIXED)
    rows, positions = list(range(8)), [9, 100, 3, 5000, 77, 1, 12, 13]
    together = sample(logits, plan, rows, positions)
    for tp_size in (2, 3, 4):
        assert sample(logits, plan, rows, positions, tp_size) == together
    for row in rows:
        one = sample(logits[row : row + 1], plan, [row], [positions[row]])
        assert one == [together[row]]
    shuffled = [5, 2, 7, 0, 1, 6, 3, 4]
    tokens = sample(logits[shuffled], plan, shuffled, [positions[r] for r in shuffled])
    assert tokens == [together[r] for r in shuffled]


def test_the_list_size_does_not_change_tokens() -> None:
    logits, plan = random_logits(8), admission(MIXED)
    expected = sample(logits, plan, list(range(8)), [4] * 8, list_size=VOCAB)
    for list_size in (1, 8, 256):
        assert sample(logits, plan, list(range(8)), [4] * 8, 2, list_size) == expected


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.4, "top_p": 0.97},
        {"temperature": 1.0, "min_p": 0.02},
        {"temperature": 0.9, "top_k": 100, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_distribution(params: dict, vary: str) -> None:
    """10,000 draws over seeds or positions against softmax(logits / T) restricted to the tokens that stay."""
    draws, batch = 10_000, 1000
    values = random_logits(1, 1.5, seed=8)
    values[0, 300:] = -np.inf
    scaled = values[0] * np.float32(1 / np.float32(params["temperature"]))
    stay = sorted(
        reference_kept(scaled, params.get("top_k") or VOCAB, params.get("top_p", 1.0), params.get("min_p", 0))
    )
    probabilities = np.zeros(VOCAB)
    probabilities[stay] = np.exp(scaled[stay].astype(np.float64))
    probabilities /= probabilities.sum()
    counts = np.zeros(VOCAB, dtype=np.int64)
    logits = np.repeat(values, batch, 0)
    for first in range(0, draws, batch):
        many = range(first, first + batch)
        if vary == "seed":
            plan, positions = admission([params | {"seed": s} for s in many]), [3] * batch
        else:
            plan, positions = admission([params | {"seed": 6}] * batch), list(many)
        counts += np.bincount(sample(logits, plan, list(range(batch)), positions), minlength=VOCAB)
    assert abs(chi_square(counts, probabilities)) < 4


@pytest.mark.parametrize("tp_size", [1, 2])
def test_suppressed_ids_are_not_sampled_before_their_position(tp_size: int) -> None:
    logits = random_logits(3)
    best = np.argsort(-logits, axis=1)
    suppress = {0: (10, best[0, :3].tolist()), 2: (20, [0, VOCAB - 1, *best[2, :11].tolist()])}
    plan = admission([{"temperature": 0.0}] * 3, suppress)
    assert sample(logits, plan, [0, 1, 2], [9, 9, 19], tp_size) == [best[0, 3], best[1, 0], best[2, 11]]
    assert sample(logits, plan, [0, 1, 2], [10, 9, 20], tp_size) == best[:, 0].tolist()


def test_a_new_request_in_a_row_forgets_the_old_parameters() -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    sampler = make_sampler(admission([{"top_k": 3}], {0: (100, [best])}), TPGroup.single(), 1)
    plan = admission([{"temperature": 0.0}])
    sampler.state.apply(plan, torch.from_numpy(plan.sampling.copy()), *torch.empty(2, 0, 3, dtype=torch.int32))
    mode = sampler.state.mode(np.array([0]), np.array([5]))
    assert not (mode.noisy or mode.suppress or mode.num_filtered)
    assert sampler.sample(torch.from_numpy(logits), torch.tensor([0]), torch.tensor([5]), mode).tolist() == [best]


def test_a_step_takes_the_cheapest_path_that_its_rows_allow() -> None:
    params = [{"temperature": 0.0}, {}, {"top_k": 64}, {"top_k": 65}, {"top_p": 0.9}, {"top_k": VOCAB}, {"top_k": -1}]
    state = make_sampler(admission(params, {0: (8, [1])}), TPGroup.single(), len(params)).state

    def mode(*rows: int, position: int = 8) -> tuple:
        found = state.mode(np.array(rows), np.full(len(rows), position))
        return found.noisy, found.num_filtered, found.wide, found.wide_k, found.suppress

    assert mode(0) == (False, 0, False, False, False)
    assert mode(0, position=7) == (False, 0, False, False, True)
    assert mode(0, 1) == (True, 0, False, False, False)
    assert mode(1, 2, 2) == (True, 2, False, False, False)
    assert mode(3) == (True, 1, True, True, False)
    assert mode(4) == (True, 1, True, False, False)
    assert mode(5, 6) == (True, 0, False, False, False)  # top_k off, or no smaller than the vocabulary


@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 100, "min_p": 0.1}]
)
def test_scores_that_allow_no_token_give_none_and_disturb_no_other_row(tp_size: int, params: dict) -> None:
    logits = random_logits(7)
    rows, positions, plan = list(range(7)), [5] * 7, admission([params] * 7)
    expected = sample(logits, plan, rows, positions, tp_size)
    logits[1, 200] = np.nan
    logits[2, 17] = -np.float32(np.nan)
    logits[3] = np.nan
    logits[4, 383] = np.inf
    logits[5] = -np.inf
    logits[6, :300] = -np.inf  # whole shards, but not all
    tokens = sample(logits, plan, rows, positions, tp_size)
    assert tokens[1:6] == [UNUSABLE] * 5
    assert tokens[0] == expected[0] and 300 <= tokens[6] < VOCAB
