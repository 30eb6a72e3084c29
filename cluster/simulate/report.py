"""Runs side by side: a table on the terminal, a plot into a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.errors import ConfigError
from cluster.simulate.metrics import PERCENTILES, RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVE_POINTS = 500


def print_report(title: str, results: list[RunResult]) -> None:
    """One column a run on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("")
    for result in results:
        table.add_column(result.label, justify="right")
    columns = [table_rows(result.summary()) for result in results]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    print(title)
    Console(width=None if Console().is_terminal else 40 + 30 * len(results)).print(table)


def table_rows(summary: dict[str, Any]) -> dict[str, str]:
    """What the table says of a run, line by line."""
    rows = {
        "requests finished": f"{summary['finished']:,} of {summary['requests']:,}",
        "refused / failed": f"{summary['refused']:,} / {summary['failed']:,}",
        "virtual time": f"{summary['seconds']:,.1f} s",
        "output": f"{summary['output_tokens_per_s']:,.0f} tok/s",
        "output per GPU": f"{summary['output_tokens_per_s_per_gpu']:,.0f} tok/s",
        "input": f"{summary['input_tokens_per_s']:,.0f} tok/s",
        "requests": f"{summary['requests_per_s']:,.2f} /s",
    }
    for key, name in (("ttft_s", "first token"), ("itl_s", "between tokens"), ("e2e_s", "whole request")):
        values = summary[key] or {}
        for part in ("mean", *(f"p{p}" for p in PERCENTILES)):
            rows[f"{name} {part}"] = duration(values[part]) if values else "-"
    return rows | {
        "cache hit rate": f"{summary['hit_rate']:.1%}",
        "prefilled": f"{summary['prefilled_tokens']:,} tok",
        "preemptions": f"{summary['preemptions']:,}",
        "steps": f"{summary['steps']:,}",
        "simulated in": f"{summary['real_seconds']:,.1f} s",
    }


def duration(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:,.2f} ms"


def check_plot(path: str | None) -> None:
    """Raises ConfigError if a plot is wanted and cannot be made or written; call before the work."""
    if path is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'raydix[bench]'") from error
    if not Path(path).expanduser().resolve().parent.is_dir():
        raise ConfigError(f"--plot {path}: no such directory")


def plot(path: str, title: str, results: list[RunResult]) -> None:
    """Distributions of both latencies, the line and the cache's share over time, a curve a run, into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title, fontsize=11)
    (first, between), (waiting, hits) = figure.subplots(2, 2)
    for result in results:
        recorder, series = result.recorder, result.series
        _distribution(first, recorder.first_token_latency, result.label)
        _distribution(between, 1000 * recorder.inter_token_latency, result.label)
        waiting.plot(series[:, 0], series[:, 1], label=result.label, linewidth=1.2)
        input_tokens = series[:, 3] + series[:, 4]
        hits.plot(series[:, 0], 100 * series[:, 3] / np.maximum(input_tokens, 1), label=result.label, linewidth=1.5)
    for axes, name, x, y in (
        (first, "time to first token", "seconds", "requests that are as fast, %"),
        (between, "time between tokens", "milliseconds", "tokens that are as fast, %"),
        (waiting, "requests in line", "virtual seconds", "waiting"),
        (hits, "input tokens from the prefix cache, since the start", "virtual seconds", "%"),
    ):
        axes.set(title=name, xlabel=x, ylabel=y)
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    figure.savefig(Path(path).expanduser(), dpi=110, format="png")


def _distribution(axes: Axes, values: np.ndarray, label: str) -> None:
    if not len(values):
        return
    share = np.linspace(0, 100, CURVE_POINTS)
    axes.plot(np.percentile(values, share), share, label=label, linewidth=1.5)
    low, high = float(values.min()), float(values.max())
    if low > 0 and high > 20 * low:
        axes.set_xscale("log")
