"""`raydix bench collectives`: all-reduce and sampling between ranks, without anything else."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.cli.flags import help_text, positive_int
from cluster.cli.output import Timeline, check_json_path, print_table, write_json
from cluster.config import EngineConfig
from cluster.errors import ConfigError


def add_parser(kinds: Any) -> None:
    """Adds the benchmark to `kinds`, an argparse sub-parser collection."""
    parser = kinds.add_parser(
        "collectives",
        help="what all-reduce and sampling cost between the ranks of one machine",
        description="One process a rank, on the first --tp-size cards of this machine over NCCL and symmetric memory, "
        "or on its CPU over gloo, with the shapes of a model: its weights are not needed.",
    )
    parser.add_argument("model", nargs="?", help=help_text("model", EngineConfig.model_fields["model"]))
    parser.add_argument("--tp-size", type=positive_int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--rows", type=positive_int, nargs="+", default=[1, 8, 64, 256], help="entries of a step (default: 1 8 64 256)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result into FILE as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures on all ranks; prints what the first one saw."""
    import torch

    from cluster.bench.collectives import bench_collectives
    from cluster.model_files import resolve_model
    from worker.errors import ModelError

    check_json_path(args.json)
    cards = torch.cuda.device_count()
    device = ("cuda" if cards else "cpu") if args.device == "auto" else args.device
    if args.tp_size < 2:
        raise ConfigError(f"--tp-size {args.tp_size}: one rank has nobody to meet; use 2 or more")
    if device == "cuda" and cards < args.tp_size:
        raise ConfigError(f"--tp-size {args.tp_size} needs as many CUDA devices, here are {cards}; use --device cpu")
    timeline = Timeline()
    timeline(f"{args.tp_size} ranks on {device}", 0.0)
    try:
        result = bench_collectives(resolve_model(args.model, dummy=True), args.tp_size, device, args.dtype, args.rows)
    except ModelError as error:
        raise ConfigError(str(error)) from error
    timeline.done()
    print_table(result["rows"])
    write_json(args.json, result)
    return 0
