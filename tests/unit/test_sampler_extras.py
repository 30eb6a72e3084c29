"""Bias, penalties and log probabilities of a sharded sampler against plain numpy, at several TP sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from thread_group import ThreadGroup, run_ranks

from scheduler.sampling_params import MAX_BIASED_TOKENS, SamplingParams
from scheduler.step import ExtraCounts, LogprobBlock, PlanExtras, StepPlan, StepPlanWriter, pack_sampling
from worker.parallel import TPGroup
from worker.sampling import Sampler
from worker.sampling.extras import INITIAL_BIAS_WIDTH, INITIAL_ROWS, first_where
from worker.sampling.logprobs import logprob_words

torch.set_num_threads(1)
VOCAB, ROWS = 384, 20


def admission(rows: dict[int, dict]) -> StepPlan:
    """A plan that only admits rows: penalties (presence, frequency, repetition), prompt, generated, bias, logprobs."""
    penalised = {row: given for row, given in rows.items() if "penalties" in given}
    histories = {row: given["prompt"] + given["generated"] for row, given in penalised.items()}
    biases = {row: given["bias"] for row, given in rows.items() if "bias" in given}
    logprobs = {row: given["logprobs"] for row, given in rows.items() if "logprobs" in given}
    history = [token for tokens in histories.values() for token in tokens]
    bias = [pair for one in biases.values() for pair in one.items()]
    counts = ExtraCounts(len(penalised), len(histories), len(history), len(biases), len(bias), len(logprobs))
    plan = StepPlanWriter(1).begin(
        step_id=1, num_rows=0, num_decode=0, num_samples=0, num_tokens=0, sampling=len(rows),
        extras=counts if counts.words else None,
    )  # fmt: skip
    base = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": 1, "prompt_len": 1}
    for entry, row in zip(plan.sampling, rows, strict=True):
        pack_sampling(entry, row=row, **base)
    if plan.extras is not None:
        for entry, (row, given) in zip(plan.extras.penalties, penalised.items(), strict=True):
            entry[0], entry[4] = row, len(given["prompt"])
            entry[1:4] = np.array(given["penalties"], dtype=np.float32).view(np.int32)
        plan.extras.history_runs[:] = np.array([(r, 0, len(t)) for r, t in histories.items()]).reshape(-1, 3)
        plan.extras.history_tokens[:] = history
        plan.extras.bias_runs[:] = np.array([(r, len(b)) for r, b in biases.items()]).reshape(-1, 2)
        plan.extras.bias_ids[:] = [token for token, _ in bias]
        plan.extras.bias_values[:] = np.array([value for _, value in bias], dtype=np.float32).view(np.int32)
        plan.extras.logprob_rows[:] = np.array(list(logprobs.items())).reshape(-1, 2)
    return plan.seal()


def apply(sampler: Sampler, plan: StepPlan) -> None:
    sections = [torch.from_numpy(s.copy()) for s in (plan.sampling, plan.suppress_runs, plan.suppress_ids)]
    extras = None
    if plan.extras is not None:
        words = plan.buffer[len(plan.buffer) - plan.extras.counts.words :]
        extras = PlanExtras(torch.from_numpy(words.copy()), plan.extras.counts)
    sampler.state.apply(plan, *sections, extras)


def adjusted(logits: np.ndarray, given: dict, generated: list[int]) -> np.ndarray:
    """float64 logits of one row after bias and penalties."""
    logits = logits.astype(np.float64)
    for token, bias in given.get("bias", {}).items():
        logits[token] += bias
    if "penalties" in given:
        presence, frequency, repetition = given["penalties"]
        counts = np.bincount(np.array(given["generated"] + generated, dtype=int), minlength=VOCAB)
        seen = (counts > 0) | (np.bincount(given["prompt"], minlength=VOCAB) > 0)
        logits = np.where(seen, np.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits = logits - frequency * counts - presence * (counts > 0)
    return logits


GIVEN = {
    3: {"penalties": (0.5, 1.5, 1.0), "prompt": [1, 2, 2, 300], "generated": [5, 5, 383]},
    0: {"bias": {0: -100.0, 383: 3.5, 191: 2.0, 192: 9.0}},
    19: {
        "penalties": (-2.0, -0.3, 1.7), "prompt": list(range(0, 384, 3)), "generated": [],
        "bias": {i: float(i % 7) for i in range(INITIAL_BIAS_WIDTH * 5)}, "logprobs": 4,
    },
    7: {},
    8: {"logprobs": 20},
    2: {"penalties": (2.0, 2.0, 0.5), "prompt": [9], "generated": [9, 9, 9, 10]},
}  # fmt: skip


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_greedy_with_bias_and_penalties_over_several_steps(tp_size: int) -> None:
    """Row 19 lies beyond the first table of counts; few distinct tokens, so that they repeat."""
    order = [7, 19, 3, 8, 0, 2]
    rng = np.random.default_rng(4)
    steps = rng.normal(0, 1, (12, len(order), VOCAB)).astype(np.float32)
    steps[:, :, [5, 9, 191, 192, 300]] += 4

    def work(tp: ThreadGroup) -> tuple[list[list[int]], list[np.ndarray]]:
        group = TPGroup.single() if tp.size == 1 else tp
        share = slice(VOCAB // tp.size * tp.rank, VOCAB // tp.size * (tp.rank + 1))
        sampler = Sampler(ROWS, VOCAB, share.start, group, torch.device("cpu"))
        first = {row: GIVEN[row] for row in (3, 0, 7, 8)}
        apply(sampler, admission(first))
        assert len(sampler.state.extras.counts) == INITIAL_ROWS
        apply(sampler, admission({row: GIVEN[row] for row in (19, 2)}))
        assert len(sampler.state.extras.counts) == 20
        tokens, words = [], []
        for step in steps:
            logits, rows = torch.from_numpy(step[:, share].copy()), torch.tensor(order)
            mode = sampler.state.mode(np.array(order), np.full(len(order), 9))
            assert mode.extras.num_penalised == 3 and mode.extras.biased and not mode.is_plain
            assert mode.extras.logprob_index.tolist() == [1, 3] and mode.extras.top == 20
            raw = sampler.take_raw(logits, rows, mode)
            sampled = sampler.sample(logits, rows, torch.full((len(order),), 9), mode)
            tokens.append(sampled.tolist())
            words.append(sampler.sampled_logprobs(raw, sampled).numpy())
        return tokens, words

    results = run_ranks(tp_size, work)
    generated: dict[int, list[int]] = {row: [] for row in order}
    for index, step in enumerate(steps):
        block = LogprobBlock(results[0][1][index])
        for other in results[1:]:
            np.testing.assert_array_equal(other[1][index], block.words)
        for entry, row in enumerate(order):
            expected = int(adjusted(step[entry], GIVEN[row], generated[row]).argmax())
            assert all(result[0][index][entry] == expected for result in results), (index, row)
            generated[row].append(expected)
        for place, entry in enumerate((1, 3)):  # of the raw logits, not of the adjusted ones
            raw = step[entry].astype(np.float64)
            logprobs = raw - np.log(np.exp(raw - raw.max()).sum()) - raw.max()
            token = results[0][0][index][entry]
            assert abs(block.logprobs[place] - logprobs[token]) < 1e-5
            assert block.ranks[place] == 1 + (logprobs > logprobs[token]).sum()
            best = np.argsort(-logprobs, kind="stable")[:20]
            assert block.top_ids[place].tolist() == best.tolist()
            np.testing.assert_allclose(block.top_logprobs[place], logprobs[best], atol=1e-5)
    assert any(len(set(tokens)) < len(tokens) for tokens in generated.values())


@pytest.mark.parametrize("tp_size", [1, 2])
def test_equal_logits_rank_by_id_and_missing_ids_count_for_nothing(tp_size: int, monkeypatch) -> None:
    monkeypatch.setattr("worker.sampling.logprobs.SLICE_ELEMENTS", 8)  # one row at a time
    logits = np.full((3, 8), -np.inf, dtype=np.float32)
    logits[:, :6] = [2.0, 1.0, 2.0, 0.0, 2.0, 1.0]

    def work(tp: ThreadGroup) -> np.ndarray:
        group = TPGroup.single() if tp.size == 1 else tp
        share = slice(8 // tp.size * tp.rank, 8 // tp.size * (tp.rank + 1))
        sampler = Sampler(2, 8, share.start, group, torch.device("cpu"))
        local = torch.from_numpy(logits[:, share].copy())
        return logprob_words(local, torch.tensor([4, 0, 3]), 5, share.start, sampler._order, group).numpy()

    block = LogprobBlock(run_ranks(tp_size, work)[0])
    total = np.log(np.exp(logits[0, :6]).sum())
    assert block.ranks.tolist() == [3, 1, 6]
    assert block.top_ids.tolist() == [[0, 2, 4, 1, 5]] * 3
    np.testing.assert_allclose(block.logprobs, np.array([2, 2, 0]) - total, atol=1e-6)
    np.testing.assert_allclose(block.top_logprobs[0], np.array([2, 2, 2, 1, 1]) - total, atol=1e-6)


def test_more_alternatives_than_ids() -> None:
    words = logprob_words(
        torch.zeros(1, 3), torch.tensor([1]), 5, 0, Sampler(1, 3, 0, TPGroup.single(), torch.device("cpu"))._order,
        TPGroup.single(),
    )  # fmt: skip
    block = LogprobBlock(words.numpy())
    assert block.top_ids.tolist() == [[0, 1, 2, -1, -1]]
    np.testing.assert_allclose(block.top_logprobs, [[-np.log(3)] * 3 + [-np.inf] * 2], rtol=1e-6)


def test_a_row_forgets_its_last_owner() -> None:
    sampler = Sampler(ROWS, VOCAB, 0, TPGroup.single(), torch.device("cpu"))
    rows, positions = np.array([2, 19]), np.array([5, 5])
    assert sampler.state.mode(rows, positions).extras is None
    apply(sampler, admission({2: GIVEN[2], 19: GIVEN[19]}))
    assert sampler.state.mode(rows, positions).extras is not None
    apply(sampler, admission({2: {}, 19: {}}))
    mode = sampler.state.mode(rows, positions)
    assert mode.extras is None and mode.is_plain
    apply(sampler, admission({2: {"bias": {7: 1.0}}}))
    mode = sampler.state.mode(rows, positions)
    assert mode.extras.biased and mode.extras.num_penalised == 0 and not len(mode.extras.logprob_index)
    logits = torch.zeros(2, VOCAB)
    assert sampler.sample(logits, torch.tensor(rows), torch.tensor(positions), mode).tolist() == [7, 0]


def test_first_where_is_ascending() -> None:
    flags = torch.tensor([False, True, True, False, True])
    assert first_where(flags, 3).tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    ("field", "good", "bad", "limit"),
    [
        ("presence_penalty", [-2, 2.0, 0], [-2.01, 3, float("nan")], "2"),
        ("frequency_penalty", [-2.0, 2, 0.5], [2.1, -5, float("inf")], "2"),
        ("repetition_penalty", [0.01, 1, 2.5], [0, -1.0, float("inf")], "greater than 0|1000|finite"),
        ("logprobs", [None, 0, 20], [21, -1], "20|0"),
        ("prompt_logprobs", [None, 0, 20], [21, -1], "20|0"),
        (
            "logit_bias", [None, {}, {5: 100, "7": -100.0}],
            [{5: 100.5}, {-1: 0.0}, {"a": 1.0}, {"-3": 1.0}, {1.5: 1.0}, {3: float("nan")}, [1]],
            "-100..100|0..2|integer|dictionary",
        ),
    ],
)  # fmt: skip
def test_limits_name_field_value_and_limit(field: str, good: list, bad: list, limit: str) -> None:
    for value in good:
        SamplingParams(**{field: value})
    for value in bad:
        with pytest.raises(ValidationError, match=limit) as error:
            SamplingParams(**{field: value})
        assert field in str(error.value)


def test_the_size_of_a_bias_is_limited() -> None:
    SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASED_TOKENS), 1.0))
    with pytest.raises(ValidationError, match=f"{MAX_BIASED_TOKENS + 1} tokens, at most {MAX_BIASED_TOKENS}"):
        SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 1.0))
    assert SamplingParams(logit_bias={"12": 1}).logit_bias == {12: 1.0}
