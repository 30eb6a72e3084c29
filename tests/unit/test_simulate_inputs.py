"""What goes into a simulation and comes out: traces, cost models, flags, files."""

from __future__ import annotations

import builtins
import json

import numpy as np
import pytest

from cluster.cli import main
from cluster.errors import ConfigError
from cluster.presets import PRESETS
from cluster.simulate.calibrate import fit, nonnegative_least_squares
from cluster.simulate.cost_model import CARDS, CalibratedCost, ModelShape, RooflineCost, StepShape
from cluster.simulate.metrics import spread
from cluster.simulate.synthetic import Lengths
from cluster.simulate.tokens import prompt_tokens
from cluster.simulate.traces import load_trace
from scheduler.config import SchedulerConfig
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

LLAMA_8B = ModelShape.from_config(PRESETS["Llama-3.1-8B"])
LLAMA_70B = ModelShape.from_config(PRESETS["Llama-3.1-70B"])


def load(path, limit=None, rate=2.0, think_time=1.0, seed=0, speed=1.0):
    return load_trace(path, limit, rate, think_time, seed, speed)


def decodes(rows: int, context: int) -> StepShape:
    return StepShape(rows, rows, 0, rows, rows * context, 0, 0)


def prefill(tokens: int) -> StepShape:
    return StepShape(tokens, 0, 1, 1, 0, tokens, tokens * (tokens + 1) // 2)


# ---------------------------------------------------------------- traces


def test_sharegpt_conversations_become_sessions(tmp_path):
    file = tmp_path / "sharegpt.json"
    talk = [("human", "a" * 400), ("gpt", "b" * 80), ("human", "c" * 40), ("gpt", "d" * 8), ("human", "no answer")]
    messages = [{"from": who, "value": text} for who, text in talk]
    file.write_text(json.dumps([{"id": "x", "conversations": messages}, {"conversations": messages[:2]}]))
    first, second, twin = load(file).requests
    assert (first.prompt_len, first.output_len, first.after) == (100, 20, None)
    assert (second.prompt_len, second.output_len, second.after) == (130, 2, 0)
    assert second.prompt[0] == first.prompt[0] == twin.prompt[0] and second.prompt[1].key == first.output_key
    assert 0 < first.arrival < twin.arrival and len(load(file, limit=2).requests) == 2


def test_mooncake_blocks_are_shared(tmp_path):
    file = tmp_path / "mooncake.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 10, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1030, "output_length": 0, "hash_ids": [0, 1, 3]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    one, two = load(file, speed=2.0).requests
    assert (one.prompt_len, one.output_len, one.arrival) == (1100, 10, 0.0)
    assert (two.prompt_len, two.output_len, two.arrival) == (1030, 1, 1.5)
    a, b = prompt_tokens(one.prompt, 1000), prompt_tokens(two.prompt, 1000)
    assert (a[:1024] == b[:1024]).all() and (a[1024:1030] != b[1024:]).any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"timestamp": 1, "input_length": 4}', "line 1 is no Mooncake entry"),
        ('{"timestamp": 1, "input_length": 900, "output_length": 1, "hash_ids": [1]}', "1 hash ids for 900 tokens"),
        ('[{"id": 1}]', "no ShareGPT trace"),
        ("[]", "holds no request"),
        ("", "holds no request"),
    ],
)
def test_a_bad_trace_is_an_error_that_says_where(tmp_path, text, message):
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(file)


def test_length_distributions():
    rng = np.random.default_rng(0)
    assert set(Lengths.parse("7").draw(5, rng)) == {7}
    assert set(Lengths.parse("uniform:2:4").draw(200, rng)) == {2, 3, 4}
    for text in ("exp:300", "lognormal:300:1"):
        drawn = Lengths.parse(text).draw(20_000, rng)
        assert min(drawn) >= 1 and np.mean(drawn) == pytest.approx(300, rel=0.05)
    for text in ("", "x", "0", "uniform:5:2", "uniform:5", "exp:1:2", "gauss:3:1"):
        with pytest.raises(ConfigError, match="no length distribution"):
            Lengths.parse(text)


# ---------------------------------------------------------------- cost models


def test_the_shape_of_a_plan():
    config = SchedulerConfig(64, 4, 4, 64, 32, overlap_depth=1)
    scheduler = Scheduler(config)
    for number, length in enumerate((20, 20, 6)):
        sampling = SamplingParams(max_tokens=4, seed=0)
        scheduler.add(Request(number, np.arange(length) + 100 * number, sampling))
    assert StepShape.of(scheduler.schedule()) == StepShape(32, 0, 2, 1, 0, 32, 20 * 21 // 2 + 12 * 13 // 2)


def test_the_card_model_is_near_what_was_measured():
    """DESIGN section 10, one H200: 4.9 ms to decode a token, 6.9 s for 64 prompts of 4,352 tokens."""
    cost = RooflineCost(LLAMA_8B, CARDS["H200"])
    assert cost.seconds(decodes(1, 1150)) == pytest.approx(4.9e-3, rel=0.1)
    assert 64 * cost.seconds(prefill(4352)) == pytest.approx(6.9, rel=0.1)


def test_steps_cost_more_with_more_to_do_and_less_on_more_cards():
    cost = RooflineCost(LLAMA_70B, CARDS["H100"], tp_size=4)
    for small, large in [(decodes(1, 100), decodes(64, 100)), (decodes(8, 100), decodes(8, 9000)),
                         (prefill(100), prefill(2000))]:  # fmt: skip
        assert cost.seconds(small) < cost.seconds(large)
        assert RooflineCost(LLAMA_70B, CARDS["H100"], 8).seconds(large) < cost.seconds(large)
    assert cost.num_pages(32) == pytest.approx(cost.num_pages(16) / 2, abs=1)
    with pytest.raises(ConfigError, match="do not fit on 1 x H100"):
        RooflineCost(LLAMA_70B, CARDS["H100"]).num_pages(16)


def known_cost() -> CalibratedCost:
    per = {"decodes": 1e-4, "prefills": 0.0, "samples": 0.0, "decode_context": 2e-6, "prefill_context": 0.0,
           "pairs": 3e-7}  # fmt: skip
    return CalibratedCost("m", "x", 1000, 16, [(1, 0.02), (8, 0.025), (64, 0.1), (256, 0.4)], per, 1e-4, {})


def test_calibration_survives_its_file(tmp_path):
    file = tmp_path / "cpu.json"
    known_cost().save(file)
    assert CalibratedCost.load(file) == known_cost()
    assert known_cost().seconds(StepShape(448, 0, 0, 0, 0, 0, 0)) == pytest.approx(0.7)  # goes on beyond the last knot
    file.write_text("{}")
    with pytest.raises(ConfigError, match="no calibration file"):
        CalibratedCost.load(file)


def test_the_fit_finds_the_costs_behind_measurements():
    cost, rng = known_cost(), np.random.default_rng(0)
    shapes = [decodes(rows, context) for rows in (1, 2, 4, 6, 8, 12, 16) for context in (10, 300, 900)]
    shapes += [prefill(n) for n in (8, 16, 20, 32, 50, 64, 100, 128, 200, 256)]
    shapes += [StepShape(n + 4, 4, 1, 5, 4 * 200, n, n * n // 2) for n in (12, 28, 60, 124, 180, 252)]
    measured = {shape: (cost.seconds(shape) * rng.normal(1, 0.01, 3)).tolist() for shape in shapes}
    fitted = fit(measured, 1e-4, "m", 1000, 16)
    for shape in [*shapes, decodes(3, 500), decodes(10, 77), prefill(150)]:
        assert fitted.seconds(shape) == pytest.approx(cost.seconds(shape), rel=0.05)
    assert fitted.fit["mean_error"] < 0.02 and min(fitted.per.values()) >= 0


def test_nonnegative_least_squares():
    rng = np.random.default_rng(1)
    a = rng.normal(size=(40, 6))
    truth = np.array([1.0, 0, 2, 0, 0.5, 3])
    assert nonnegative_least_squares(a, a @ truth) == pytest.approx(truth, abs=1e-6)
    found = nonnegative_least_squares(a, a @ (truth - 1))
    residual = a.T @ (a @ (truth - 1) - a @ found)
    assert (found >= 0).all() and (residual[found == 0] <= 1e-6).all()
    assert residual[found > 0] == pytest.approx(0, abs=1e-6)


def test_spread():
    assert spread(np.array([])) is None
    assert spread(np.arange(101.0)) == {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}


# ---------------------------------------------------------------- the command

SMALL = ["simulate", "--requests", "40", "--prompt-len", "64", "--output-len", "uniform:4:16", "--rate", "100"]


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    file = tmp_path / "out.json"
    assert main([*SMALL, "--policy", "fcfs,cache", "--replicas", "2", "--router", "random", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    for text in ("40 requests", "fcfs, random", "longest_prefix, random", "first token p99", "cache hit rate"):
        assert text in printed
    written = json.loads(file.read_text())
    assert [run["label"] for run in written["runs"]] == ["fcfs, random", "longest_prefix, random"]
    assert all(run["finished"] == 40 and run["ttft_s"]["p50"] > 0 for run in written["runs"])
    assert written["settings"]["requests"] == 40


def test_a_trace_file_and_a_calibration(tmp_path, capsys):
    trace, calibration = tmp_path / "t.jsonl", tmp_path / "c.json"
    trace.write_text('{"timestamp": 5, "input_length": 30, "output_length": 3, "hash_ids": [4]}\n')
    known_cost().save(calibration)
    assert main(["simulate", "--trace", str(trace), "--calibration", str(calibration)]) == 0
    assert "1 of 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policy", "fifo"], "unknown policy 'fifo'; known are fcfs"),
        (["--policy", ","], "unknown policy ''; known are fcfs"),
        (["--replicas", "2", "--router", "random,x"], "unknown router 'x'"),
        (["--calibrate", "x.json", "--max-step-tokens", "4"], "at least 4 running requests"),
        (["--card", "B99"], "unknown card 'B99'; known are H200"),
        (["--model", "nope"], "no such directory with a config.json; shapes: Qwen3-0.6B"),
        (["--model", "Llama-3.1-70B"], "do not fit on 1 x H200"),
        (["--trace", "/no/such"], "cannot read the trace /no/such"),
        (["--output-len", "many"], "no length distribution"),
        (["--compare-real"], "--compare-real needs --calibration FILE"),
        (["--calibration", "/no/such"], "no calibration file"),
        (["--json", "/no/such/out.json"], "no such directory"),
    ],
)
def test_mistakes_are_named(argv, message, capsys):
    assert main([*SMALL, *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("raydix: error: ") and message in error


def test_a_plot_without_matplotlib_is_refused_before_the_work(monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main([*SMALL, "--plot", "x.png"]) == 2
    assert "--plot needs matplotlib: pip install 'raydix[bench]'" in capsys.readouterr().err


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "x.png"
    assert main([*SMALL, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
