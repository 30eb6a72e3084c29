"""`raydix doctor`: examines a Ray cluster and says what to do about what is wrong."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cluster.cli.flags import positive_float
from cluster.cli.output import Timeline, check_json_path, write_json

if TYPE_CHECKING:
    from cluster.doctor import Finding


def add_parser(commands: Any) -> None:
    """Adds the command to `commands`, an argparse sub-parser collection."""
    parser = commands.add_parser(
        "doctor",
        help="examine a Ray cluster before serving on it",
        description="Examines every node of a Ray cluster (versions, GPUs, shared memory, limits, clock, the model's "
        "files) and every pair of nodes (all-reduce with gloo, and with NCCL where GPUs are free). Exit code 1: "
        "something is wrong.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a directory or hub id that must be readable on every node"
    )
    parser.add_argument(
        "--ray-address", default="auto", metavar="HOST:PORT", help="(default: the cluster of this node)"
    )
    parser.add_argument(
        "--timeout", type=positive_float, default=60.0, metavar="SECONDS", help="of each step (default: %(default)g)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the findings into FILE as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints a table and advice on stdout; returns 0 or 1."""
    from cluster.cli import EXIT_FAILED, EXIT_OK
    from cluster.doctor import Level, examine

    check_json_path(args.json)
    timeline = Timeline()
    findings = examine(args.ray_address, args.model, args.timeout, timeline)
    timeline.done()
    print_findings(findings)
    write_json(args.json, [asdict(finding) for finding in findings])
    return EXIT_FAILED if any(finding.level is Level.FAILURE for finding in findings) else EXIT_OK


def print_findings(findings: list[Finding]) -> None:
    """The table, then what to do about each line that is not ok, then one line that says it all."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from cluster.doctor import Level

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    colours = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "red"}
    table = Table(box=None, pad_edge=False)
    for title in ("check", "where", "", "found"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        level = f"[{colours[finding.level]}]{finding.level.value}[/]"
        table.add_row(escape(finding.check), escape(finding.where), level, escape(finding.detail))
    console.print(table)
    wrong = [finding for finding in findings if finding.level is not Level.OK]
    if wrong:
        console.print("\nwhat to do")
    for finding in wrong:
        place = f"{finding.check}, {finding.where}"
        console.print(f"  [{colours[finding.level]}]{escape(place)}[/]: {escape(finding.advice)}", soft_wrap=True)
    failures = sum(finding.level is Level.FAILURE for finding in findings)
    console.print(f"\n{failures} failure(s), {len(wrong) - failures} warning(s), {len(findings)} findings")
