"""`raydix replay`: what a recording of the flight recorder holds, checked and run again."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.cli.flags import positive_int
from cluster.cli.output import Timeline, check_json_path, print_table, write_json

if TYPE_CHECKING:
    from cluster.config import EngineConfig
    from cluster.flight import Recording
    from cluster.flight.replay import Outcome


def add_parser(commands: Any) -> None:
    """Adds the command to `commands`, an argparse sub-parser collection."""
    parser = commands.add_parser(
        "replay",
        help="run a recording of the last steps before a failure again",
        description="Checks every slot that the recorded steps name, then runs them on fresh workers and compares the "
        "tokens. Servers save recordings on failures, and on POST /flight_record; only those of a server with "
        "--record-tokens can be run. Exit code 1: a slot is wrong, a token differs, or it cannot be run.",
    )
    parser.add_argument("file", metavar="FILE", help="the recording")
    parser.add_argument("--inspect", action="store_true", help="run nothing: show the steps' shapes, slots and times")
    parser.add_argument("--last", type=positive_int, default=20, help="steps that --inspect shows (default: 20)")
    parser.add_argument("--model", metavar="MODEL", help="the checkpoint, if it is elsewhere now")
    parser.add_argument("--device", choices=("cpu", "cuda", "fake"), help="instead of the recorded one")
    parser.add_argument("--tp-size", type=positive_int, help="instead of the recorded one")
    parser.add_argument("--ray-address", help="for more than one worker: local, auto or HOST:PORT")
    parser.add_argument("--json", metavar="FILE", help="write the result into FILE as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints on stdout; returns 0 if everything agrees, else 1. Raises RecordingError for a file that will not do."""
    from cluster.cli import EXIT_FAILED, EXIT_OK
    from cluster.flight import read_recording
    from cluster.flight.analysis import step_table, summary
    from cluster.flight.replay import check_replayable, find_wrong_slot

    check_json_path(args.json)
    recording = read_recording(Path(args.file).expanduser())
    print("\n".join(summary(recording)), flush=True)
    if args.inspect:
        print_table(step_table(recording)[-args.last :])
    else:
        check_replayable(recording)
    wrong = find_wrong_slot(recording) if recording.broken is None else None
    print(f"wrong slot: {wrong}" if wrong else "slots: all are right" if recording.broken is None else "", flush=True)
    result: dict[str, Any] = {"wrong_slot": wrong}
    agree = wrong is None
    if args.inspect:
        result["steps"] = step_table(recording)
    else:
        outcome = run_again(recording, engine_config(recording, args))
        result |= asdict(outcome)
        agree &= outcome.first is None
        print(verdict(outcome))
    write_json(args.json, result)
    return EXIT_OK if agree else EXIT_FAILED


def engine_config(recording: Recording, args: argparse.Namespace) -> EngineConfig:
    """The recorded settings, and what the flags say instead. Raises ConfigError."""
    from cluster.config import EngineConfig

    names = ("model", "device", "tp_size", "ray_address")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if "device" in given:  # kernels of another one
        given["attention_backend"] = "auto"
    return EngineConfig.parse(recording.engine | given)


def run_again(recording: Recording, config: EngineConfig) -> Outcome:
    from cluster.flight.replay import replay
    from cluster.flight.workers import fresh_workers

    timeline = Timeline()
    with fresh_workers(config, timeline) as group:
        outcome = replay(
            recording, group, config.step_timeout, lambda done: timeline("replay", done / len(recording.steps))
        )
    timeline.done()
    return outcome


def verdict(outcome: Outcome) -> str:
    ran = f"{outcome.steps} steps with {outcome.tokens} tokens in {outcome.seconds:.1f} s"
    if outcome.first is None:
        return f"replay: {ran}: all tokens agree"
    return f"replay: {ran}: {outcome.differing} tokens differ, the first in {outcome.first}"
