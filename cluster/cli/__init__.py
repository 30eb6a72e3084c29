"""The `raydix` command. Only what a command needs is imported, so `raydix --help` needs neither torch nor ray."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from cluster.errors import ConfigError, InvalidRequestError, RaydixError

EXIT_OK = 0
EXIT_FAILED = 1  # it could not start, or a request failed
EXIT_USAGE = 2  # a flag, a setting, the model or a prompt is wrong
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the process's exit code (see docs/operations.md)."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except (ConfigError, InvalidRequestError) as error:
        return fail(error, EXIT_USAGE)
    except RaydixError as error:
        return fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def fail(error: Exception, code: int) -> int:
    """Says what went wrong on stderr, without a traceback, and gives back `code`."""
    print(f"raydix: error: {error}", file=sys.stderr, flush=True)
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run`, a function from the parsed arguments to an exit code."""
    from cluster.cli import bench, doctor, generate, replay, serve, simulate, status, validate

    parser = argparse.ArgumentParser(prog="raydix", description="Tensor-parallel LLM serving on Ray.")
    parser.add_argument("--version", action="version", version=f"raydix {version('raydix')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (serve, generate, bench, simulate, validate, doctor, status, replay):
        command.add_parser(commands)
    return parser
