"""`raydix bench collectives` between two processes on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.cli import main
from tests.checkpoints import make_checkpoint


def run(*arguments: str) -> int:
    return main(["bench", "collectives", *arguments])


def test_all_reduce_and_sampling_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = make_checkpoint("llama", tmp_path / "llama")
    out = tmp_path / "result.json"
    assert run(str(path), "--device", "cpu", "--dtype", "float32", "--rows", "1", "8", "--json", str(out)) == 0
    small, large = json.loads(out.read_text())["rows"]
    assert (small["rows"], small["KiB"], large["rows"], large["KiB"]) == (1, 0.25, 8, 2)  # 64 numbers a row
    for row in (small, large):
        assert row["symmetric_us"] is None
        assert min(row["gloo_us"], row["step_ms"], row["sampler_us"], row["gathered_us"]) > 0
        assert row["step_ms"] == pytest.approx(2 * 2 * row["gloo_us"] / 1e3)  # two layers
    assert "gathered_us" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp-size", "1"], "one rank has nobody to meet"),
        (["--tp-size", "64", "--device", "cuda"], "needs as many CUDA devices"),
        (["--tp-size", "3", "--device", "cpu"], "does not divide"),
        (["--device", "cpu", "--rows", str(10**14)], "a rank failed: "),
        (["--json", "/nowhere/at/all.json"], "no such directory"),
    ],
)
def test_what_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture, flags: list[str], words: str) -> None:
    path = make_checkpoint("llama", tmp_path / "llama")
    assert run(str(path), *flags) != 0
    assert words in capsys.readouterr().err
