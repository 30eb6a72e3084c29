"""`raydix bench router`: three ways of choosing a replica, on one load."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.cli.flags import add_engine_flags, engine_config, positive_int
from cluster.cli.output import Timeline, check_json_path, print_table, write_json

COLUMNS = (
    "case",
    "policy",
    "completed",
    "failed",
    "cached_share",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "e2e_p99_ms",
    "spread",
)
FAKE = {
    "device": "fake", "fake_tokens_per_s": 1500.0, "num_pages": 2048, "max_step_tokens": 256, "max_seq_len": 4096,
}  # fmt: skip


def add_parser(kinds: Any) -> None:
    """Adds the benchmark to `kinds`, an argparse sub-parser collection."""
    parser = kinds.add_parser(
        "router",
        help="conversations over several fake replicas: Ray's power of two, affinity, and the cache-aware router",
        description="Serves with fake engines that take 1,500 tokens a second unless told otherwise, and sends "
        "conversations, one hot prefix, prompts that nobody has, and conversations past a slow and a dead replica.",
    )
    parser.add_argument("--replicas", type=positive_int, default=4, help="(default: %(default)s)")
    parser.add_argument("--conversations", type=positive_int, default=50, help="(default: %(default)s)")
    parser.add_argument("--turns", type=positive_int, default=6, help="requests of each (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the result into FILE as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw it into FILE (PNG); needs matplotlib")
    add_engine_flags(parser, positional_model=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs everything, some minutes; 0 if no request failed but under the dead replica."""
    from cluster.bench.serve.routing import compare_routers, plot
    from cluster.simulate.report import check_plot

    check_json_path(args.json)
    check_plot(args.plot)
    config = engine_config(args)
    unset = {name: value for name, value in FAKE.items() if name not in config.model_fields_set}
    timeline = Timeline()
    result = compare_routers(config.model_copy(update=unset), args.replicas, args.conversations, args.turns, timeline)
    timeline.done()
    print_table([{key: row[key] for key in COLUMNS} for row in result["rows"]])
    write_json(args.json, result)
    if args.plot:
        plot(args.plot, result)
    return int(any(row["failed"] for row in result["rows"] if row["case"] != "a dead replica"))
