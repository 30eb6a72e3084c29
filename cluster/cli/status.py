"""`raydix status`: replicas, ranks and load of what is served on a Ray cluster."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cluster.cli.flags import positive_float
from cluster.cli.output import cell, check_json_path, write_json

if TYPE_CHECKING:
    from rich.console import Group

    from cluster.status import ApplicationStatus

TIMEOUT = 10.0
RATE_SECONDS = 1.0  # between the two looks that tokens/s are taken from, without --watch


def add_parser(commands: Any) -> None:
    """Adds the command to `commands`, an argparse sub-parser collection."""
    parser = commands.add_parser(
        "status",
        help="show what is served on a Ray cluster",
        description="Shows replicas, their ranks, nodes and GPUs, KV use, prefix cache hits, tokens/s and recoveries. "
        "Exit code 1: nothing is served, or a replica does not serve.",
    )
    parser.add_argument("--watch", action="store_true", help="show it again and again, until Ctrl-C")
    parser.add_argument(
        "--interval", type=positive_float, default=2.0, metavar="SECONDS", help="of --watch (default: %(default)g)"
    )
    parser.add_argument(
        "--ray-address", default="auto", metavar="HOST:PORT", help="(default: the cluster of this node)"
    )
    parser.add_argument("--json", metavar="FILE", help="write it into FILE as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints on stdout; returns 0, or 1 if something does not serve. Raises StartupError where nothing is served."""
    from cluster import ray_runtime
    from cluster.cli import EXIT_FAILED, EXIT_OK
    from cluster.status import collect

    check_json_path(args.json)
    runtime = ray_runtime.connect(args.ray_address, min_cpus=0, may_start=False)
    try:
        before = collect(TIMEOUT)
        if args.watch:
            watch(before, args.interval)
        time.sleep(RATE_SECONDS)
        now = collect(TIMEOUT)
    finally:
        runtime.close()
    write_json(args.json, [asdict(application) for application in now])
    make_console().print(render(before, now))
    return EXIT_OK if all(serves(application) for application in now) else EXIT_FAILED


def watch(before: list[ApplicationStatus], interval: float) -> None:
    """Shows the state every `interval` seconds, until it is interrupted."""
    from rich.live import Live

    from cluster.status import collect

    with Live(render(before, before), console=make_console(), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            now = collect(TIMEOUT)
            live.update(render(before, now), refresh=True)
            before = now


def serves(application: ApplicationStatus) -> bool:
    """Whether all of it is well."""
    well = all(replica.problem is None for replica in application.replicas) and not application.silent
    return well and application.status == "RUNNING"


def make_console() -> Any:
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def render(before: list[ApplicationStatus], now: list[ApplicationStatus]) -> Group:
    """Per application: a line on its deployments, a table of replicas, a table of ranks, and what is wrong."""
    from rich.console import Group
    from rich.markup import escape

    from cluster.status import rate

    speeds = rate(before, now, "generation_tokens")
    parts: list[Any] = []
    for application in now:
        states = "; ".join(
            f"{name} {', '.join(f'{count} {state.lower()}' for state, count in counts.items() if count) or 'none'}"
            for name, (_, counts) in application.deployments.items()
        )
        parts.append(f"[bold]{escape(application.name)}[/] {application.status}: {escape(states)}")
        if application.message:
            parts.append(escape(application.message))
        parts += [replica_table(application, speeds), rank_table(application)]
        wrong = [f"{each.replica}: {each.problem}" for each in application.replicas if each.problem is not None]
        parts += [f"[red]{escape(text)}[/]" for text in [*wrong, *application.silent]]
    return Group(*parts)


def replica_table(application: ApplicationStatus, speeds: dict[str, float]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("replica", "model", "driver on", "pid"):
        table.add_column(title)
    for title in ("running", "waiting", "KV use", "hit rate", "tokens/s", "tokens", "preempted", "recovered"):
        table.add_column(title, justify="right")
    for replica in application.replicas:
        metrics = replica.metrics
        speed = speeds.get(replica.replica)
        table.add_row(
            replica.replica, replica.info["served_model_name"], replica.node_ip, str(replica.info["driver_pid"]),
            cell(metrics.get("running", "-")), cell(metrics.get("waiting", "-")), f"{replica.kv_use:.0%}",
            f"{replica.hit_rate:.0%}", "-" if speed is None else cell(round(speed)),
            cell(metrics.get("generation_tokens", "-")), cell(metrics.get("preemptions", "-")),
            cell(metrics.get("recoveries", "-")),
        )  # fmt: skip
    return table


def rank_table(application: ApplicationStatus) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("replica", "rank", "node", "pid", "GPU"):
        table.add_column(title)
    for replica in application.replicas:
        for number, rank in enumerate(replica.info["ranks"]):
            gpus = ", ".join(rank["gpu_ids"]) or "none"
            table.add_row(replica.replica if number == 0 else "", str(number), rank["node_ip"], str(rank["pid"]), gpus)
    return table
