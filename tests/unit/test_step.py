"""The step message: what is written is what is read, and a damaged or foreign buffer is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.step import (
    HEADER_WORDS,
    SAMPLING_WORDS,
    H,
    PlanFlags,
    S,
    StepFormatError,
    StepPlan,
    StepPlanWriter,
    StepResult,
    pack_sampling,
    plan_words,
)

SECTIONS = (
    "rows", "cached_len", "device_len", "sample", "out_loc",
    "page_deltas", "token_runs", "run_tokens", "sampling", "suppress_runs", "suppress_ids",
)  # fmt: skip
COUNTS = ("num_rows", "padded_rows", "num_decode", "num_samples", "num_tokens", "padded_tokens")


@st.composite
def plan_contents(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, np.ndarray], int, PlanFlags]:
    """Arguments of `begin` and every section's content, as any writer could choose them."""
    rows = draw(st.integers(0, 12))
    tokens = draw(st.integers(0, 40))
    runs = draw(st.lists(st.integers(0, 9), max_size=6))
    suppress = draw(st.lists(st.integers(0, 5), max_size=4))
    counts = {
        "num_rows": rows,
        "num_decode": draw(st.integers(0, rows)),
        "num_samples": draw(st.integers(0, rows)),
        "num_tokens": tokens,
        "padded_rows": rows + draw(st.integers(0, 5)),
        "padded_tokens": tokens + draw(st.integers(0, 5)),
        "page_deltas": draw(st.integers(0, 6)),
        "token_runs": len(runs),
        "run_tokens": sum(runs),
        "sampling": draw(st.integers(0, 4)),
        "suppress_runs": len(suppress),
        "suppress_ids": sum(suppress),
    }
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shapes = {
        **dict.fromkeys(("rows", "cached_len", "device_len", "sample"), (counts["padded_rows"],)),
        "out_loc": (counts["padded_tokens"],),
        "page_deltas": (counts["page_deltas"], 3),
        "token_runs": (len(runs), 3),
        "run_tokens": (sum(runs),),
        "sampling": (counts["sampling"], SAMPLING_WORDS),
        "suppress_runs": (len(suppress), 3),
        "suppress_ids": (sum(suppress),),
    }
    sections = {name: rng.integers(-(2**31), 2**31, shape, dtype=np.int32) for name, shape in shapes.items()}
    sections["token_runs"][:, 2] = runs
    sections["suppress_runs"][:, 2] = suppress
    return counts, sections, draw(st.integers(0, 2**64 - 1)), draw(st.sampled_from(list(PlanFlags)))


def write(writer: StepPlanWriter, content: tuple[dict[str, int], dict[str, np.ndarray], int, PlanFlags]) -> StepPlan:
    counts, sections, step_id, flags = content
    plan = writer.begin(step_id=step_id, flags=flags, **counts)
    for name, values in sections.items():
        getattr(plan, name)[...] = values
    return plan.seal()


def small_plan() -> StepPlan:
    plan = StepPlanWriter(ring=1).begin(
        step_id=7, num_rows=2, num_decode=1, num_samples=2, num_tokens=4, token_runs=1, run_tokens=3, sampling=1
    )
    plan.buffer[HEADER_WORDS:] = np.arange(len(plan.buffer) - HEADER_WORDS)
    plan.token_runs[0] = (5, 0, 3)
    return plan.seal()


@given(plan_contents(), st.sampled_from(["array", "bytes", "memoryview"]))
def test_plan_round_trip(content: tuple, kind: str) -> None:
    plan = write(StepPlanWriter(ring=2, initial_words=8), content)
    counts, sections, step_id, flags = content
    data = {"array": plan.buffer, "bytes": plan.buffer.tobytes(), "memoryview": memoryview(plan.buffer.tobytes())}[kind]
    read = StepPlan.decode(data)
    assert read.step_id == step_id and read.flags == flags
    assert {name: getattr(read, name) for name in COUNTS} == {name: counts[name] for name in COUNTS}
    assert read.is_decode_only == (counts["num_decode"] == counts["num_rows"])
    for name in SECTIONS:
        np.testing.assert_array_equal(getattr(read, name), sections[name], err_msg=name)


@given(st.lists(plan_contents(), min_size=2, max_size=6), st.integers(1, 4))
def test_plans_of_the_ring_do_not_disturb_each_other(contents: list[tuple], ring: int) -> None:
    writer = StepPlanWriter(ring=ring, initial_words=4)
    plans = [write(writer, content) for content in contents]
    for plan, content in list(zip(plans, contents, strict=True))[-ring:]:
        for name in SECTIONS:
            np.testing.assert_array_equal(getattr(StepPlan.decode(plan.buffer), name), content[1][name])


@given(plan_contents(), st.data())
def test_a_truncated_or_longer_plan_is_refused(content: tuple, data: st.DataObject) -> None:
    raw = write(StepPlanWriter(ring=1), content).buffer.tobytes()
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(StepFormatError):
        StepPlan.decode(raw[:cut])
    with pytest.raises(StepFormatError):
        StepPlan.decode(raw + b"\0" * data.draw(st.integers(1, 9)))


@given(plan_contents(), st.data())
def test_any_flipped_bit_of_a_plan_is_refused(content: tuple, data: st.DataObject) -> None:
    raw = bytearray(write(StepPlanWriter(ring=1), content).buffer.tobytes())
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(StepFormatError):
        StepPlan.decode(bytes(raw))


@given(st.binary(max_size=400))
def test_bytes_of_a_stranger_are_refused(data: bytes) -> None:
    with pytest.raises(StepFormatError):
        StepPlan.decode(data)
    with pytest.raises(StepFormatError):
        StepResult.decode(data)


@pytest.mark.parametrize("word", [w for w in H if w >= H.NUM_ROWS])
@pytest.mark.parametrize("value", [-1, 2**31 - 1, 1 << 30])
def test_impossible_counts_are_refused_before_the_checksum(word: H, value: int) -> None:
    plan = small_plan()
    plan.buffer[word] = value
    with pytest.raises(StepFormatError, match=r"impossible counts|its counts need"):
        StepPlan.decode(plan.seal().buffer)


def test_runs_that_do_not_add_up_are_refused() -> None:
    plan = small_plan()
    plan.token_runs[0, 2] = 2
    with pytest.raises(StepFormatError, match="do not add up"):
        StepPlan.decode(plan.seal().buffer)


def test_another_version_is_refused_and_says_so() -> None:
    plan = small_plan()
    plan.buffer[H.MAGIC] += 1
    with pytest.raises(StepFormatError, match="same raydix version"):
        StepPlan.decode(plan.buffer)
    with pytest.raises(StepFormatError, match="not a step result"):
        StepResult.decode(small_plan().buffer)
    with pytest.raises(StepFormatError, match="not a step plan"):
        StepPlan.decode(StepResult(1, np.arange(64, dtype=np.int32)).encode())


def test_an_unsealed_plan_is_refused() -> None:
    plan = small_plan()
    plan.rows[0] += 1
    with pytest.raises(StepFormatError, match="step plan 7 fails its checksum"):
        StepPlan.decode(plan.buffer)


def test_steady_decode_of_256_rows_stays_under_8_kib() -> None:
    """Every 16th row starts a page in an average step at page size 16; even with all rows at once it fits."""
    steady = plan_words(
        256, 256, page_deltas=16, token_runs=0, run_tokens=0, sampling=0, suppress_runs=0, suppress_ids=0
    )
    crossing = plan_words(
        256, 256, page_deltas=256, token_runs=0, run_tokens=0, sampling=0, suppress_runs=0, suppress_ids=0
    )
    assert 4 * steady < 8192, f"{4 * steady} bytes"
    assert 4 * crossing < 2 * 8192, f"{4 * crossing} bytes"


def test_hot_sections_depend_on_padded_sizes_only() -> None:
    writer = StepPlanWriter(ring=2)
    small = writer.begin(
        step_id=1, num_rows=3, num_decode=3, num_samples=3, num_tokens=3, padded_rows=8, padded_tokens=8
    )
    large = writer.begin(
        step_id=2, num_rows=8, num_decode=8, num_samples=8, num_tokens=8, page_deltas=5, sampling=2, token_runs=1
    )
    for name in SECTIONS[:5]:
        offsets = [
            (getattr(plan, name).__array_interface__["data"][0] - plan.buffer.__array_interface__["data"][0])
            for plan in (small, large)
        ]
        assert offsets[0] == offsets[1], name


@given(
    st.integers(0, 2**31 - 1),
    st.floats(0, 1000, width=32),
    st.floats(0, 1, width=32),
    st.floats(0, 1, width=32),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31 - 1),
)
def test_sampling_entry_keeps_floats_and_the_64_bit_seed(
    row: int, temperature: float, top_p: float, min_p: float, top_k: int, seed: int, prompt_len: int
) -> None:
    entry = np.full(SAMPLING_WORDS, -1, dtype=np.int32)
    pack_sampling(
        entry, row=row, temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, seed=seed, prompt_len=prompt_len
    )
    assert entry[S.ROW] == row and entry[S.TOP_K] == top_k and entry[S.PROMPT_LEN] == prompt_len
    floats = entry[S.TEMPERATURE : S.MIN_P + 1].view(np.float32)
    assert floats.tolist() == [temperature, top_p, min_p]
    assert int(entry[S.SEED_LOW : S.SEED_HIGH + 1].copy().view(np.uint64)[0]) == seed


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(-1, 2**31 - 1), max_size=40), st.data())
def test_result_round_trip_and_damage(step_id: int, tokens: list[int], data: st.DataObject) -> None:
    raw = StepResult(step_id, np.array(tokens, dtype=np.int32)).encode().tobytes()
    read = StepResult.decode(raw)
    assert read.step_id == step_id and read.tokens.tolist() == tokens
    with pytest.raises(StepFormatError):
        StepResult.decode(raw[: data.draw(st.integers(0, len(raw) - 1))])
    damaged = bytearray(raw)
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(StepFormatError):
        StepResult.decode(bytes(damaged))
