"""What a run came to: numbers, a table, and a plot over time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.bench.serve.client import Call
from cluster.bench.serve.generator import Run
from cluster.simulate.metrics import PERCENTILES, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LATENCIES = {
    "ttft_s": "first token",
    "itl_s": "between chunks",
    "tpot_s": "per output token",
    "e2e_s": "whole request",
}
BUSY_CLIENT = 0.8  # CPU seconds a second from which on the load generator itself may be what is slow
BINS = 60


def summarise(run: Run) -> dict[str, Any]:
    """Plain numbers: seconds, tokens, and per second.

    `itl_s` are the gaps between chunks of text, all pooled (`tokens_per_chunk` tells how many tokens those hold);
    `tpot_s` is one value a request, from its first to its last chunk over the tokens but the first. `start_lag_s`: how
    much later than it should have been a request was sent. Latencies are None where there is nothing to measure.
    """
    good = [call for call in run.calls if call.error is None]
    talking = [call for call in run.calls if call.chunks]
    seconds = run.ended - run.started
    output = sum(call.output_tokens for call in run.calls)
    prompt = sum(call.prompt_tokens for call in good)
    cached = sum(call.cached_tokens for call in good)
    chunks = sum(len(call.chunks) for call in good)
    gaps = [np.diff(call.chunks) for call in talking]
    return {
        "requests": len(run.calls) + run.skipped,
        "completed": len(good),
        "failed": len(run.calls) - len(good),
        "skipped": run.skipped,
        "errors": dict(Counter(call.error for call in run.calls if call.error is not None).most_common()),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (output + prompt) / seconds,
        "cached_tokens": cached,
        "cached_share": cached / prompt if prompt else 0.0,
        "tokens_per_chunk": sum(call.output_tokens for call in good) / chunks if chunks else None,
        "ttft_s": spread(np.array([call.chunks[0] - call.started for call in talking])),
        "itl_s": spread(np.concatenate(gaps) if gaps else np.empty(0)),
        "tpot_s": spread(np.array([time_per_token(call) for call in good if call.output_tokens > 1 and call.chunks])),
        "e2e_s": spread(np.array([call.ended - call.started for call in good])),
        "start_lag_s": spread(np.array([max(0.0, call.started - call.due) for call in run.calls])),
        "client_cpu_s": run.cpu_seconds,
    }


def time_per_token(call: Call) -> float:
    return (call.chunks[-1] - call.chunks[0]) / (call.output_tokens - 1)


def request_rows(run: Run) -> list[dict[str, Any]]:
    """Each request's own numbers, in the order of sending; times from the start of the run."""
    return [
        {
            "session": call.session,
            "turn": call.turn,
            "sent_s": call.started - run.started,
            "ttft_s": call.chunks[0] - call.started if call.chunks else None,
            "e2e_s": call.ended - call.started,
            "prompt_tokens": call.prompt_tokens,
            "output_tokens": call.output_tokens,
            "cached_tokens": call.cached_tokens,
            "error": call.error,
        }
        for call in sorted(run.calls, key=lambda call: call.started)
    ]


def print_report(title: str, summary: dict[str, Any]) -> None:
    """Totals, and a table of latencies, on stdout."""
    from rich.console import Console
    from rich.table import Table

    print(title)
    skipped = f", {summary['skipped']:,} not sent after one that failed" if summary["skipped"] else ""
    print(
        f"{summary['completed']:,} of {summary['requests']:,} requests in {summary['seconds']:,.1f} s "
        f"({summary['requests_per_s']:,.2f} a second), {summary['failed']:,} failed{skipped}"
    )
    print(
        f"output {summary['output_tokens']:,} tokens, {summary['output_tokens_per_s']:,.0f} a second; "
        f"prompts {summary['prompt_tokens']:,} tokens, {summary['cached_share']:.1%} from the cache"
    )
    if summary["tokens_per_chunk"]:
        print(f"{summary['tokens_per_chunk']:.2f} tokens a chunk")
    columns = ["mean", *(f"p{p}" for p in PERCENTILES), "max"]
    table = Table()
    for name in ("milliseconds", *columns):
        table.add_column(name, justify="left" if name == "milliseconds" else "right")
    for key, name in LATENCIES.items():
        values = summary[key]
        table.add_row(name, *(f"{1000 * values[column]:,.2f}" if values else "-" for column in columns))
    Console(width=None if Console().is_terminal else 100).print(table)
    for error, count in summary["errors"].items():
        print(f"{count:,} x {error}")
    if summary["client_cpu_s"] > BUSY_CLIENT * summary["seconds"]:
        share = summary["client_cpu_s"] / summary["seconds"]
        print(f"note: this client was busy {share:.0%} of the time; it may be what was slow, not the server")


def plot(path: str, title: str, run: Run) -> None:
    """First tokens, gaps, throughput and open requests over the time of the run, into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title, fontsize=11)
    (first, between), (rate, open_requests) = figure.subplots(2, 2)
    talking = [call for call in run.calls if call.chunks]
    edges = np.linspace(0.0, run.ended - run.started, BINS + 1)
    if talking:
        sent = np.array([call.started - run.started for call in talking])
        latency = np.array([1000 * (call.chunks[0] - call.started) for call in talking])
        first.plot(sent, latency, ".", markersize=3, alpha=0.5, label="a request")
        _percentiles_over_time(first, edges, sent, latency, (50,))
        times = np.concatenate([call.chunks for call in talking]) - run.started
        gaps = [1000 * np.diff(call.chunks) for call in talking]
        ends = np.concatenate([call.chunks[1:] for call in talking]) - run.started
        _percentiles_over_time(between, edges, ends, np.concatenate(gaps), PERCENTILES)
        weights = np.concatenate([np.full(len(call.chunks), call.output_tokens / len(call.chunks)) for call in talking])
        rate.stairs(np.histogram(times, edges, weights=weights)[0] / max(np.diff(edges)[0], 1e-9), edges)
    starts = np.sort([call.started - run.started for call in run.calls])
    finishes = np.sort([call.ended - run.started for call in run.calls])
    open_requests.plot(edges, np.searchsorted(starts, edges) - np.searchsorted(finishes, edges))
    failed = [call.ended - run.started for call in run.calls if call.error is not None]
    if failed:
        open_requests.plot(failed, np.zeros(len(failed)), "rx", label="failed")
    for axes, name, y in (
        (first, "time to first token", "milliseconds"),
        (between, "between chunks", "milliseconds"),
        (rate, "output", "tokens a second"),
        (open_requests, "open requests", ""),
    ):
        axes.set(title=name, xlabel="seconds", ylabel=y)
        axes.set_ylim(bottom=0)
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=9)
    figure.savefig(Path(path).expanduser(), dpi=110, format="png")


def _percentiles_over_time(
    axes: Axes, edges: np.ndarray, times: np.ndarray, values: np.ndarray, percentiles: tuple[int, ...]
) -> None:
    """A line for each percentile of the values in each bin of time; bins without values are left out."""
    bins = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, len(edges) - 2)
    used = np.unique(bins)
    if not len(used):
        return
    found = np.array([np.percentile(values[bins == bin], percentiles) for bin in used])
    for column, percentile in enumerate(percentiles):
        axes.plot((edges[used] + edges[used + 1]) / 2, found[:, column], label=f"p{percentile}", linewidth=1.3)
