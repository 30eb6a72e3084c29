"""Calibration and comparison end to end on a tiny checkpoint: how close they come depends on the machine and is
measured by hand (docs/scheduling.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.cli import main
from tests.checkpoints import make_checkpoint

TRACE = [
    "--requests", "12", "--prompt-len", "uniform:8:60", "--output-len", "uniform:2:8", "--rate", "200",
    "--prefix-len", "32", "--prefix-groups", "2", "--max-running-requests", "8", "--max-step-tokens", "64",
    "--num-pages", "200",
]  # fmt: skip


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = make_checkpoint("llama", tmp_path_factory.mktemp("tiny") / "model", max_position_embeddings=1024)
    file = path.parent / "cpu.json"
    argv = ["--calibrate", str(file), "--model", str(path), "--repeats", "1", "--max-running-requests", "8"]
    assert main(["simulate", *argv, "--max-step-tokens", "64"]) == 0
    return str(path), str(file)


def test_a_calibration_describes_every_step(calibrated):
    values = json.loads(Path(calibrated[1]).read_text())
    assert (values["model"], values["vocab_size"], values["fit"]["shapes"] > 50) == ("model", 101, True)
    assert values["knots"][0][0] == 1 and values["knots"][-1][0] == 64
    assert all(seconds >= 0 for _, seconds in values["knots"]) and values["host_seconds"] > 0


@pytest.mark.parametrize("clock", ["cpu", "wall"])
def test_a_real_run_does_the_same_work_as_the_simulated_one(calibrated, clock: str, tmp_path, capsys):
    model, file = calibrated
    out = tmp_path / "out.json"
    flags = ["--model", model, "--calibration", file, "--compare-real", "--clock", clock, "--repeats", "2"]
    assert main(["simulate", *TRACE, *flags, "--json", str(out)]) == 0
    assert "prediction against the median run" in capsys.readouterr().out
    report = json.loads(out.read_text())
    simulated, *measured = report["runs"]
    assert len(measured) == 2 and set(report["difference"]) >= {"output_tokens_per_s", "ttft_s p50", "itl_s p99"}
    for run in measured:
        for key in ("finished", "output_tokens", "prefilled_tokens", "cached_tokens", "preemptions"):
            assert run[key] == simulated[key], key


def test_a_real_run_refuses_conversations(calibrated, capsys):
    model, file = calibrated
    assert main(["simulate", *TRACE, "--turns", "2", "--model", model, "--calibration", file, "--compare-real"]) == 2
    assert "a real run takes single requests" in capsys.readouterr().err


def test_a_model_that_is_not_there(tmp_path, capsys):
    assert main(["simulate", "--calibrate", str(tmp_path / "x.json"), "--model", "/no/such/model"]) == 2
    assert "/no/such/model" in capsys.readouterr().err
