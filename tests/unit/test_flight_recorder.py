"""The flight recorder: rings that have wrapped run again, wrong slots are named, bad files are refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from cluster.errors import RecordingError
from cluster.flight import Recording, read_recording
from cluster.flight.recording import MAGIC, write_into
from cluster.flight.replay import check_replayable, find_wrong_slot
from scheduler.fake_model import FakeModel
from tests.unit.flight_harness import RecordedHarness
from tests.unit.scheduler_harness import make_config, make_request
from tests.unit.test_scheduler_stateful import CI, EOS, SchedulerMachine, configs
from tests.unit.toy_constraint import ToyConstraint

SHARED = list(range(100, 124))


def wrapped(directory: Path, with_tokens: bool = True) -> tuple[RecordedHarness, Recording]:
    """A ring of 16 steps after 40: rows that began before it, rows that found prefixes of before it, penalties,
    min_tokens, log probabilities, masks; and what it holds."""
    config = make_config(num_pages=100, max_running_requests=6, max_step_tokens=32, eos_token_ids=EOS)
    harness = RecordedHarness(config, FakeModel(1000, EOS[0], 0.02), steps=16, with_tokens=with_tokens)
    harness.run(make_request(1, [*SHARED, 7], max_tokens=2))
    harness.add(
        make_request(2, [1, 2, 3], max_tokens=60, ignore_eos=True, frequency_penalty=0.5, logprobs=2),
        make_request(3, [*SHARED, 9], max_tokens=70, min_tokens=60, temperature=1.0, seed=5),
        make_request(4, [4] * 50, max_tokens=20, ignore_eos=True),
        make_request(7, [7], max_tokens=60, request_constraint=ToyConstraint(1000, 60, eos=EOS[0])),
    )
    for _ in range(40):
        harness.step()
    harness.add(make_request(5, [*SHARED, 8, 8], max_tokens=30, prompt_logprobs=1), make_request(6, [*SHARED, 6] * 2))
    for _ in range(5):
        harness.step()
    harness.plan()
    return harness, harness.check(directory)


def wrong_slot(recording: Recording, at: int) -> int:
    """Have step number `at` store the last row's token one slot further. Returns its id."""
    plan = recording.steps[at].plan
    plan.out_loc[plan.num_tokens - 1] += 1
    plan.seal()
    return plan.step_id


class TestWrappedRing:
    def test_runs_again(self, tmp_path: Path) -> None:
        harness, recording = wrapped(tmp_path)
        assert recording.steps[0].plan.step_id > 20
        assert 8 <= len(recording.steps) <= 16
        assert len(recording.snapshot) >= 3
        harness.finish()

    @pytest.mark.parametrize("at", [0, 3, 7])
    @pytest.mark.parametrize("with_tokens", [True, False])
    def test_a_wrong_slot_is_named_with_its_step(self, tmp_path: Path, at: int, with_tokens: bool) -> None:
        _, recording = wrapped(tmp_path, with_tokens)
        step = wrong_slot(recording, at)
        assert find_wrong_slot(recording).startswith(f"step {step}: out_loc ")

    def test_a_page_table_that_names_another_rows_page_is_found_by_its_content(self, tmp_path: Path) -> None:
        _, recording = wrapped(tmp_path)
        step = next(step for step in recording.steps if (step.plan.page_deltas[:, 1] == 0).any())
        plan = step.plan
        others = next(each for each in recording.snapshot if each.run_tokens[0] == 1)  # request 2's
        plan.page_deltas[0, 2] = others.page_deltas[0, 2]
        plan.seal()
        assert find_wrong_slot(recording).startswith(f"step {plan.step_id}: ")

    def test_a_token_that_comes_out_otherwise_is_named(self, tmp_path: Path) -> None:
        harness, recording = wrapped(tmp_path)
        step = recording.steps[4]
        step.tokens = step.tokens + np.eye(1, len(step.tokens), 1, dtype=np.int32)[0]
        outcome = harness.replayed(recording)
        assert outcome.differing == 1 and outcome.first.step == step.plan.step_id
        assert outcome.first.recorded == outcome.first.replayed + 1
        entry = int(step.plan.sample[1])
        assert outcome.first.row == step.plan.rows[entry] and outcome.first.position == step.plan.device_len[entry]

    def test_without_token_ids_it_holds_none_and_is_not_run(self, tmp_path: Path) -> None:
        _, recording = wrapped(tmp_path, with_tokens=False)
        masks = 0
        for plan in [*recording.snapshot, *(step.plan for step in recording.steps)]:
            assert not plan.run_tokens.any() and not plan.suppress_ids.any()
            if plan.extras is not None:
                assert not plan.extras.history_tokens.any() and not plan.extras.score_targets.any()
                assert not plan.extras.masks.any()
                masks += len(plan.extras.masks)
        assert masks
        assert not any(step.tokens is not None and step.tokens.any() for step in recording.steps)
        with pytest.raises(RecordingError, match=r"holds no token ids.*--record-tokens.*--inspect"):
            check_replayable(recording)


class RecordedMachine(SchedulerMachine):
    """The scheduler under anything, and what is recorded of it runs again."""

    @initialize(
        config=configs(), late=st.booleans(), steps=st.integers(8, 24), vocab=st.sampled_from([50, 1000]),
        eos=st.sampled_from([0.0, 0.05]),
    )  # fmt: skip
    def start(self, config: dict[str, object], late: bool, steps: int, vocab: int, eos: float) -> None:
        model = FakeModel(vocab_size=vocab, eos_token_id=EOS[0], eos_probability=eos)
        self.harness = RecordedHarness(make_config(**config), model, late=late, steps=steps)
        self.next_id = 1

    @precondition(lambda self: self.next_id > 1)
    @rule()
    def record(self) -> None:
        self.harness.check(self.directory)


def run_machine(directory: Path, how: settings) -> None:
    machine = type("Machine", (RecordedMachine,), {"directory": directory})
    run_state_machine_as_test(machine, settings=how)


def test_recordings_at_any_moment_of_anything_run_again(tmp_path: Path) -> None:
    run_machine(tmp_path, settings(CI, max_examples=15))


@pytest.mark.full_grid
@pytest.mark.timeout(3600)
def test_recordings_at_any_moment_of_anything_run_again_often(tmp_path: Path) -> None:
    run_machine(tmp_path, settings(CI, max_examples=2000, derandomize=False, print_blob=True))


class TestFile:
    @pytest.fixture(scope="class")
    def good(self, tmp_path_factory: pytest.TempPathFactory) -> bytes:
        directory = tmp_path_factory.mktemp("flight")
        wrapped(directory)
        return (directory / "flight.rdx").read_bytes()

    def refused(self, tmp_path: Path, data: bytes, why: str) -> None:
        path = tmp_path / "bad.rdx"
        path.write_bytes(data)
        with pytest.raises(RecordingError, match=why):
            read_recording(path)

    def test_is_for_its_owner_only(self, tmp_path: Path) -> None:
        wrapped(tmp_path)
        assert (tmp_path / "flight.rdx").stat().st_mode & 0o777 == 0o600

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(RecordingError, match=r"cannot read .*nothing\.rdx: No such file"):
            read_recording(tmp_path / "nothing.rdx")

    def test_another_kind_of_file(self, tmp_path: Path) -> None:
        self.refused(tmp_path, b"PK\x03\x04" * 10, "no recording of raydix")
        self.refused(tmp_path, b"", "no recording of raydix")

    def test_another_version(self, tmp_path: Path, good: bytes) -> None:
        self.refused(tmp_path, MAGIC + struct.pack("<H", 99) + good[8:], "has format 99, this raydix reads format 1")

    @pytest.mark.parametrize("share", [0.001, 0.01, 0.5, 0.999])
    def test_cut_short(self, tmp_path: Path, good: bytes, share: float) -> None:
        self.refused(tmp_path, good[: int(len(good) * share)], "cut short|no recording")

    @pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.99])
    def test_one_bit_flipped(self, tmp_path: Path, good: bytes, share: float) -> None:
        data = bytearray(good)
        data[int(len(good) * share)] ^= 4
        self.refused(tmp_path, bytes(data), "damaged")

    def test_a_directory_keeps_the_latest(self, tmp_path: Path) -> None:
        harness, _ = wrapped(tmp_path)
        paths = []
        for number in range(20):
            recording = harness.recorder.take("a test")
            recording.created = f"2026-01-01T00:00:{number:02}.000+00:00"
            paths.append(write_into(tmp_path / "kept", recording))
        assert sorted((tmp_path / "kept").iterdir()) == paths[-16:]
