"""The parts of `raydix simulate` that run a model: calibration, and the comparison with a real run."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.output import Timeline, check_json_path
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from cluster.simulate.metrics import RunResult
    from cluster.simulate.traces import Trace
    from scheduler.config import SchedulerConfig


def calibrate(args: argparse.Namespace) -> int:
    """Measures this machine's CPU engine and writes the cost model."""
    from cluster.model_files import resolve_model
    from cluster.simulate.calibrate import fit, measure
    from cluster.simulate.real_engine import MeasuredWorker, load_runner
    from scheduler.config import SchedulerConfig

    check_json_path(args.calibrate, "--calibrate")
    timeline = Timeline()
    running, max_seq_len = args.max_running_requests or 16, args.max_seq_len or 1024
    budget = args.max_step_tokens or 256
    if running < 4 or max_seq_len < 256 or budget < 16:
        raise ConfigError(
            "a calibration wants at least 4 running requests, a max_seq_len of 256 and 16 tokens a step, got "
            f"{running}, {max_seq_len} and {budget}"
        )
    path = resolve_model(args.model, timeline)
    config = SchedulerConfig(
        num_pages=running * -(-max_seq_len // args.page_size), page_size=args.page_size,
        max_running_requests=running, max_seq_len=max_seq_len, max_step_tokens=budget,
        cache_type="naive", overlap_depth=1,
    )  # fmt: skip
    runner = load_runner(path, config, timeline)
    vocab_size = runner.model_info.vocab_size
    measured, host_seconds = measure(MeasuredWorker(runner), config, vocab_size, args.repeats, timeline)
    cost = fit(measured, host_seconds, path.name, vocab_size, args.page_size)
    timeline.done()
    cost.save(Path(args.calibrate).expanduser())
    print(
        f"{cost.model}: {cost.fit['steps']} steps of {cost.fit['shapes']} shapes, error of the fit: mean "
        f"{cost.fit['mean_error']:.1%}, p90 {cost.fit['p90_error']:.1%}, largest {cost.fit['max_error']:.1%}; "
        f"written to {args.calibrate}"
    )
    return 0


def run_real(args: argparse.Namespace, trace: Trace, config: SchedulerConfig) -> list[RunResult]:
    """The same trace on the CPU engine of this process, `--repeats` times."""
    from cluster.model_files import resolve_model
    from cluster.simulate.fleet import FleetSpec, simulate
    from cluster.simulate.real_engine import MeasuredWorker, check_single_turn, load_runner, run_in_real_time

    check_single_turn(trace)
    timeline = Timeline()
    runner = load_runner(resolve_model(args.model, timeline), config, timeline)
    vocab_size = runner.model_info.vocab_size
    spec = FleetSpec(config, vocab_size, window=args.report_interval)
    results = []
    for number in range(1, args.repeats + 1):
        timeline(f"serving the trace, run {number} of {args.repeats}")
        label = f"CPU engine, {args.clock} clock, {number}"
        if args.clock == "wall":
            results.append(run_in_real_time(label, trace, config, runner, vocab_size))
        else:
            results.append(simulate(label, trace, spec, lambda: MeasuredWorker(runner)))
    timeline.done()
    return results


def differences(predicted: RunResult, measured: list[RunResult]) -> dict[str, float]:
    """The prediction relative to the median of the measurements, less 1."""

    def values(result: RunResult) -> dict[str, float]:
        summary = result.summary()
        flat = {key: summary[key] for key in ("output_tokens_per_s", "seconds")}
        for key in ("ttft_s", "itl_s", "e2e_s"):
            flat |= {f"{key} {part}": summary[key][part] for part in ("mean", "p50", "p90", "p99")}
        return flat

    runs = [values(result) for result in measured]
    return {key: value / statistics.median(run[key] for run in runs) - 1 for key, value in values(predicted).items()}
