"""`raydix validate`: cluster, Serve and Kubernetes files, checked before anything is started."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Adds the command to `commands`, an argparse sub-parser collection."""
    parser = commands.add_parser(
        "validate",
        help="check cluster, Serve and Kubernetes files",
        description="Checks files for `ray up`, `serve deploy`, `kubectl apply` and --config, offline. With one "
        "cluster file, it also proves that all replicas fit. Exit code 2: something is wrong; one line for each, with "
        "file, line and key.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="YAML files, of any of these kinds")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints problems, or what was proved, on stdout; returns 0 or 2. Raises ConfigError for what is not YAML."""
    from cluster.cli import EXIT_OK, EXIT_USAGE
    from cluster.validate import validate_files

    report = validate_files(args.files)
    for problem in report.problems:
        print(problem)
    if report.problems:
        return EXIT_USAGE
    for note in report.notes:
        print(note)
    print(f"{len(args.files)} file{'s' if len(args.files) > 1 else ''} checked, nothing wrong")
    return EXIT_OK
