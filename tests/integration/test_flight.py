"""A recording of a real engine, run again by the command line on fresh workers."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cluster.cli import main
from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.flight import read_recording
from cluster.flight.recording import MAGIC
from scheduler.outputs import StepOutputs
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams

SETTINGS = {
    "device": "cpu", "executor": "inproc", "page_size": 4, "num_pages": 200, "max_running_requests": 8,
    "max_seq_len": 128, "max_step_tokens": 32, "flight_steps": 24,
}  # fmt: skip
SHARED = list(range(3, 27))


def record(model: Path, directory: Path, **settings: object) -> Path:
    """A file made in the middle of eight requests, of a ring that has wrapped."""
    outputs: queue.SimpleQueue[StepOutputs] = queue.SimpleQueue()
    config = EngineConfig(model=str(model), flight_dir=str(directory), **(SETTINGS | settings))
    engine = Engine(config, outputs.put, lambda error: None)
    engine.start()
    try:
        for number in range(8):
            noisy = {"temperature": 1.0, "repetition_penalty": 1.1, "min_tokens": 70} if number % 2 else {}
            values = {"temperature": 0.0, "seed": number, "ignore_eos": True, "max_tokens": 80} | noisy
            engine.submit(Request(number, np.array([*SHARED, number + 30]), SamplingParams(**values)))
        while outputs.get(timeout=60).step_id < 50:
            pass
        return engine.record_flight()
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def recorded(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return record(tiny_llama, tmp_path_factory.mktemp("flight"), record_tokens=True)


def test_a_wrapped_ring_gives_the_same_tokens_again(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = read_recording(recorded)
    assert recording.steps[0].plan.step_id > 12 and recording.snapshot
    assert main(["replay", str(recorded)]) == 0
    out = capsys.readouterr().out
    assert "slots: all are right" in out and "all tokens agree" in out


@pytest.mark.parametrize("at", [1, 6])
def test_a_wrong_slot_is_named_with_its_step(
    recorded: Path, at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = read_recording(recorded)
    plan = recording.steps[at].plan
    plan.out_loc[:] = plan.out_loc[::-1].copy()  # each row's K/V goes to another row
    plan.seal()
    recording.write(tmp_path / "wrong.rdx")
    assert main(["replay", str(tmp_path / "wrong.rdx")]) == 1
    out = capsys.readouterr().out
    assert f"wrong slot: step {plan.step_id}: out_loc " in out
    assert f"tokens differ, the first in step {plan.step_id}: row " in out


def test_without_token_ids_it_is_looked_at_and_not_run(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(tiny_llama, tmp_path)
    assert main(["replay", str(path)]) == 1
    assert "this recording holds no token ids" in capsys.readouterr().err
    assert main(["replay", str(path), "--inspect", "--last", "3"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "slots: all are right" in out[-1]
    assert out[-5].split()[:4] == ["step", "after_ms", "answer_ms", "decode"]


def test_a_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.rdx"
    path.write_bytes(MAGIC)
    assert main(["replay", str(path)]) == 1
    assert capsys.readouterr().err == f"raydix: error: {path}: this is no recording of raydix's flight recorder\n"
