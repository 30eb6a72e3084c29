"""The benchmark's workload and its limit, by hand calculation."""

from __future__ import annotations

import argparse
import json

import pytest

from cluster.bench.limits import Machine, ModelCost, ideal_seconds
from cluster.bench.throughput import summarise
from cluster.bench.trace import busy_share, trace_window
from cluster.bench.workload import Workload, uniform
from cluster.cli import bench


def test_the_workload_of_the_published_figures():
    load = uniform(256, 100, 1024, seed=0, vocab_size=151_936)
    assert (load.prompt_tokens, load.output_tokens) == (142_827, 133_966)


def test_runs_have_equal_lengths_and_share_no_first_page():
    first, second = (uniform(8, 16, 32, seed=1, vocab_size=300, run=run) for run in (0, 1))
    assert first.output_lens == second.output_lens
    assert [len(prompt) for prompt in first.prompts] == [len(prompt) for prompt in second.prompts]
    pages = {tuple(prompt[:16]) for prompt in first.prompts}
    assert not pages & {tuple(prompt[:16]) for prompt in second.prompts}
    assert all(0 <= id < 300 for prompt in second.prompts for id in prompt)


def test_parameters_of_a_checkpoint(tmp_path):
    config = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 4, "intermediate_size": 10, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    cost = ModelCost.from_checkpoint(tmp_path)
    layer = 8 * 16 + 2 * 8 * 8 + 16 * 8 + 3 * 8 * 10  # q, k and v, o, gate and up and down
    assert (cost.body, cost.head, cost.query_width, cost.kv_width) == (2 * layer, 800, 16, 2 * 2 * 8)


def test_limit_by_hand():
    cost = ModelCost(body=1000, head=100, layers=1, query_width=10, kv_width=4)
    load = Workload([[1] * 10, [1] * 20], [3, 1])
    prefill = 2 * 1000 * 30 + 2 * 100 * 2 + 40 * (100 + 400) / 2
    context = 2 * (10 + 1.5)
    decode_flops = 2 * 1100 * 2 + 40 * context
    decode_bytes = 2 * (1100 * 2 + 4 * context)
    slow_memory = Machine(bandwidth=1.0, peak=1e9, source="")
    assert ideal_seconds(load, cost, "bfloat16", slow_memory, 8) == pytest.approx(prefill / 1e9 + decode_bytes)
    slow_arithmetic = Machine(bandwidth=1e9, peak=1.0, source="")
    assert ideal_seconds(load, cost, "bfloat16", slow_arithmetic, 8) == pytest.approx(prefill + decode_flops)


def test_medians_over_runs():
    load = Workload([[1] * 10], [20])
    runs = [{"elapsed_s": seconds, "cached_tokens": 0} for seconds in (4.0, 1.0, 2.0)]
    result = summarise(runs, load)
    assert (result["elapsed_s"], result["output_tokens_per_s"], result["total_tokens_per_s"]) == (2.0, 10.0, 15.0)


def test_busy_share_counts_overlapping_kernels_once():
    def kernel(start: float, length: float) -> dict:
        return {"cat": "kernel", "ts": start, "dur": length}

    events = [kernel(10, 4), kernel(12, 4), kernel(13, 1), kernel(20, 10), {"cat": "cpu_op", "ts": 0, "dur": 100}]
    assert busy_share(events) == pytest.approx(16 / 20)
    assert busy_share([{"cat": "cpu_op", "ts": 0, "dur": 1}, {"name": "metadata"}]) is None


def test_a_trace_is_written_and_errors_come_through(tmp_path):
    path = tmp_path / "trace.json"
    assert trace_window(path, lambda: sum(range(10**6)), after=0.0, seconds=0.2) is None
    assert "traceEvents" in json.loads(path.read_text())
    with pytest.raises(ZeroDivisionError):
        trace_window(path, lambda: 1 / 0, after=0.0, seconds=0.2)


@pytest.mark.parametrize(
    ("flags", "usable", "backend", "spares"),
    [
        ([], True, "flash", False),
        ([], False, "auto", False),
        (["--attention-backend", "triton", "--spare-ranks"], True, "triton", True),
        (["--attention-backend", "auto"], True, "auto", False),
        (["--device", "cpu"], True, "auto", False),
    ],
)
def test_nothing_is_started_beside_the_first_requests(monkeypatch, flags, usable, backend, spares):
    monkeypatch.setattr(bench, "has_flash_attention", lambda: usable)
    parser = argparse.ArgumentParser()
    bench.add_latency(parser.add_subparsers())
    config = bench.undisturbed_config(parser.parse_args(["latency", *flags]))
    assert (config.attention_backend, config.spare_ranks) == (backend, spares)
    assert {"attention_backend": backend, "spare_ranks": spares}.items() <= config.model_dump().items()
