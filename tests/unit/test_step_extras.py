"""Optional sections of the step message: round trips, damage, and no words where nobody uses them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.step import (
    PENALTY_WORDS,
    SCORE_WORDS,
    ExtraCounts,
    H,
    LogprobBlock,
    PlanFlags,
    PromptScores,
    R,
    SampledLogprobs,
    StepFormatError,
    StepPlan,
    StepPlanWriter,
    StepResult,
    plan_words,
)

BASE = {"num_rows": 2, "num_decode": 1, "num_samples": 2, "num_tokens": 4}
counts = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def extra_contents(draw: st.DrawFn) -> tuple[ExtraCounts, dict[str, np.ndarray]]:
    """Counts and every section's content, as any writer could choose them."""
    history, bias, scores = draw(counts), draw(counts), draw(counts)
    penalties, logprobs = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    masks, mask_words = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shapes = {
        "penalties": (penalties, PENALTY_WORDS),
        "history_runs": (len(history), 3),
        "history_tokens": (sum(history),),
        "bias_runs": (len(bias), 2),
        "bias_ids": (sum(bias),),
        "bias_values": (sum(bias),),
        "logprob_rows": (logprobs, 2),
        "score_runs": (len(scores), SCORE_WORDS),
        "score_targets": (sum(scores),),
        "mask_samples": (masks,),
        "masks": (masks, mask_words if masks else 0),
    }
    sections = {name: rng.integers(-(2**31), 2**31, shape, dtype=np.int32) for name, shape in shapes.items()}
    sections["history_runs"][:, 2] = history
    sections["bias_runs"][:, 1] = bias
    sections["score_runs"][:, R.COUNT] = scores
    of_counts = ExtraCounts(
        penalties, len(history), sum(history), len(bias), sum(bias), logprobs, len(scores), sum(scores),
        masks, masks * mask_words,
    )  # fmt: skip
    return of_counts, sections


def write(content: tuple[ExtraCounts, dict[str, np.ndarray]], step_id: int = 5, **more: object) -> StepPlan:
    plan = StepPlanWriter(ring=1, initial_words=8).begin(step_id=step_id, **BASE, extras=content[0], **more)
    plan.buffer[32 : len(plan.buffer) - content[0].words] = 7
    for name, values in content[1].items():
        getattr(plan.extras, name)[...] = values
    return plan.seal()


@given(extra_contents(), st.sampled_from([PlanFlags.NONE, PlanFlags.SNAPSHOT]))
def test_plan_round_trip(content: tuple, flags: PlanFlags) -> None:
    read = StepPlan.decode(write(content, flags=flags).buffer.tobytes())
    assert read.flags == flags | PlanFlags.EXTRAS
    assert read.extras.counts == content[0]
    for name, values in content[1].items():
        np.testing.assert_array_equal(getattr(read.extras, name), values, err_msg=name)
    assert (read.rows == 7).all() and len(read.out_loc) == 4


@given(extra_contents(), st.data())
def test_damage_is_refused(content: tuple, data: st.DataObject) -> None:
    raw = write(content).buffer.tobytes()
    with pytest.raises(StepFormatError):
        StepPlan.decode(raw[: data.draw(st.integers(0, len(raw) - 1))])
    damaged = bytearray(raw)
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(StepFormatError):
        StepPlan.decode(bytes(damaged))


@pytest.mark.parametrize(("section", "column"), [("history_runs", 2), ("bias_runs", 1), ("score_runs", R.COUNT)])
@pytest.mark.parametrize("count", [1, 3, -1])
def test_runs_that_do_not_add_up_are_refused(section: str, column: int, count: int) -> None:
    of_counts = ExtraCounts(0, 1, 2, 1, 2, 0, 1, 2)
    plan = StepPlanWriter(ring=1).begin(step_id=1, **BASE, extras=of_counts)
    plan.buffer[32:] = 2
    StepPlan.decode(plan.seal().buffer)
    getattr(plan.extras, section)[0, column] = count
    with pytest.raises(StepFormatError, match="do not add up"):
        StepPlan.decode(plan.seal().buffer)


@pytest.mark.parametrize(("masks", "words"), [(2, 5), (0, 3), (3, 2)])
def test_masks_of_different_lengths_are_refused(masks: int, words: int) -> None:
    plan = StepPlanWriter(ring=1).begin(step_id=1, **BASE, extras=ExtraCounts(masks=2, mask_words=6))
    plan.buffer[32:] = 0
    plan.buffer[H.NUM_MASKS], plan.buffer[H.NUM_MASK_WORDS] = masks, words
    with pytest.raises(StepFormatError, match="impossible counts"):
        StepPlan.decode(plan.seal().buffer)


def test_a_plan_without_extras_has_no_words_for_them() -> None:
    plan = StepPlanWriter(ring=1).begin(step_id=1, **BASE)
    plan.buffer[32:] = 0
    assert plan.extras is None and not plan.flags & PlanFlags.EXTRAS
    assert len(plan.buffer) == plan_words(2, 4, 0, 0, 0, 0, 0, 0)
    assert StepPlan.decode(plan.seal().buffer).extras is None
    for word in H:
        if word >= H.NUM_PENALTIES:
            plan.buffer[word] = 1
            with pytest.raises(StepFormatError, match="impossible counts"):
                StepPlan.decode(plan.seal().buffer)
            plan.buffer[word] = 0


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def block(count: int) -> LogprobBlock:
        return LogprobBlock(rng.integers(-(2**31), 2**31, (count, 2 + 2 * draw(st.integers(0, 4))), dtype=np.int32))

    tokens = rng.integers(0, 2**31, draw(st.integers(0, 6)), dtype=np.int32)
    index = np.flatnonzero(rng.random(len(tokens)) < 0.5).astype(np.int32)
    runs = draw(counts)
    table = rng.integers(0, 2**31, (len(runs), 3), dtype=np.int32)
    table[:, 2] = runs
    return StepResult(
        draw(st.integers(0, 2**64 - 1)), tokens,
        SampledLogprobs(index, block(len(index))) if len(index) else None,
        PromptScores(table, block(sum(runs))) if runs else None,
    )  # fmt: skip


@given(results(), st.data())
def test_result_round_trip_and_damage(result: StepResult, data: st.DataObject) -> None:
    raw = result.encode().tobytes()
    read = StepResult.decode(raw)
    assert read.step_id == result.step_id
    np.testing.assert_array_equal(read.tokens, result.tokens)
    assert (read.logprobs is None, read.scores is None) == (result.logprobs is None, result.scores is None)
    if result.logprobs is not None:
        np.testing.assert_array_equal(read.logprobs.index, result.logprobs.index)
        np.testing.assert_array_equal(read.logprobs.block.words, result.logprobs.block.words)
    if result.scores is not None:
        np.testing.assert_array_equal(read.scores.runs, result.scores.runs)
        np.testing.assert_array_equal(read.scores.block.words, result.scores.block.words)
    with pytest.raises(StepFormatError):
        StepResult.decode(raw[: data.draw(st.integers(0, len(raw) - 1))])
    damaged = bytearray(raw)
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(StepFormatError):
        StepResult.decode(bytes(damaged))


@pytest.mark.parametrize("index", [[0, 0], [1, 0], [-1, 1], [0, 3]])
def test_logprobs_of_tokens_that_do_not_exist_are_refused(index: list[int]) -> None:
    block = LogprobBlock(np.zeros((2, 2), dtype=np.int32))
    result = StepResult(1, np.zeros(3, dtype=np.int32), SampledLogprobs(np.array(index, dtype=np.int32), block))
    with pytest.raises(StepFormatError, match="log probabilities"):
        StepResult.decode(result.encode())


def test_scores_that_do_not_add_up_are_refused() -> None:
    runs = np.array([[0, 1, 2]], dtype=np.int32)
    result = StepResult(1, np.zeros(0, np.int32), None, PromptScores(runs, LogprobBlock(np.zeros((1, 4), np.int32))))
    with pytest.raises(StepFormatError, match="add up"):
        StepResult.decode(result.encode())


def test_block_columns_narrowed_and_joined() -> None:
    words = np.arange(12, dtype=np.int32).reshape(2, 6)
    words[:, [1, 4, 5]] = np.array([[-1.5, -0.5, -2.0], [0, -1, -np.inf]], dtype=np.float32).view(np.int32)
    block = LogprobBlock(words)
    assert len(block) == 2 and block.top == 2
    assert block.ranks.tolist() == [0, 6] and block.logprobs.tolist() == [-1.5, 0]
    assert block.top_ids.tolist() == [[2, 3], [8, 9]] and block.top_logprobs.tolist() == [[-0.5, -2.0], [-1, -np.inf]]
    narrow = block.narrowed(1)
    assert narrow.top_ids.tolist() == [[2], [8]] and narrow.top_logprobs.tolist() == [[-0.5], [-1]]
    assert block.narrowed(5) is block
    joined = LogprobBlock.joined([narrow, narrow], 1)
    assert joined.ranks.tolist() == [0, 6, 0, 6] and joined.logprobs.tolist() == [-1.5, 0, -1.5, 0]
    assert len(LogprobBlock.joined([], 3)) == 0 and LogprobBlock.joined([], 3).top == 3
