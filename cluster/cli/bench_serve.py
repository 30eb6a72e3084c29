"""`raydix bench serve`: load on any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.cli.flags import positive_float, positive_int
from cluster.cli.output import check_json_path, write_json
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from cluster.bench.serve.generator import Run
    from cluster.bench.serve.sessions import Session

WORKLOADS = ("random", "shared-prefix", "multi-turn", "conversations", "mooncake")
FROM_FILE = ("conversations", "mooncake")
DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 16


def add_parser(kinds: Any) -> None:
    """Adds the benchmark to `kinds`, an argparse sub-parser collection."""
    parser = kinds.add_parser(
        "serve",
        help="load on an OpenAI-compatible server: throughput and latencies as clients see them",
        description="Sends streaming requests to an OpenAI-compatible server and reports what their users would have "
        "seen. Exit code 1: requests failed.",
    )
    add_server_flags(parser.add_argument_group("server"))
    add_load_flags(parser.add_argument_group("load"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write settings, summary and every request into FILE as JSON")
    output.add_argument("--plot", metavar="FILE", help="draw latencies over time into FILE (PNG); needs matplotlib")
    parser.set_defaults(run=run)


def add_server_flags(group: Any) -> None:
    group.add_argument("--url", default="http://127.0.0.1:8000", help="(default: %(default)s)")
    group.add_argument("--model", help="name that the server knows; default: the first it lists")
    group.add_argument("--api-key", help="sent as a bearer token")
    group.add_argument("--endpoint", choices=("completions", "chat"), help="default: chat for conversations")
    group.add_argument("--timeout", type=positive_float, default=600.0, help="s a request may take (default: 600)")
    group.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="ask for exactly the wanted lengths; not every server knows this field (default: yes)",
    )  # fmt: skip
    group.add_argument("--extra-body", metavar="JSON", help="object whose members join every request's body")


def add_load_flags(group: Any) -> None:
    lengths = "N, uniform:A:B, exp:MEAN or lognormal:MEAN:SIGMA"
    group.add_argument(
        "--workload", choices=WORKLOADS, default="random",
        help="conversations: ShareGPT JSON, or lines of {\"messages\": [...]}; mooncake: a trace (default: random)",
    )  # fmt: skip
    group.add_argument("--file", metavar="FILE", help="of conversations and mooncake")
    group.add_argument(
        "--requests", type=positive_int, help=f"at most (default: {DEFAULT_REQUESTS}, or the whole file)"
    )
    how = group.add_mutually_exclusive_group()
    how.add_argument("--concurrency", type=positive_int, help=f"sessions side by side (default: {DEFAULT_CONCURRENCY})")
    how.add_argument("--rate", type=positive_float, help="requests a second, Poisson, whatever the server does; or inf")
    group.add_argument("--speed", type=positive_float, help="mooncake: at the trace's times, so many times as fast")
    group.add_argument("--prompt-len", default="256", help=f"new words: {lengths} (default: %(default)s)")
    group.add_argument("--output-len", default="128", help=f"tokens: {lengths} (default: %(default)s)")
    group.add_argument("--prefix-len", type=positive_int, default=1024, help="shared-prefix: words (default: 1024)")
    group.add_argument("--prefix-groups", type=positive_int, default=1, help="different prefixes (default: 1)")
    group.add_argument("--turns", type=positive_int, default=4, help="multi-turn: requests a session (default: 4)")
    group.add_argument("--think-time", type=float, default=0.0, help="mean s between turns (default: 0)")
    group.add_argument("--seed", type=int, default=0, help="of lengths, words and times (default: %(default)s)")
    group.add_argument("--warm-up", type=int, default=1, help="requests before that do not count (default: 1)")


def run(args: argparse.Namespace) -> int:
    """Runs the load; 0 if every request was completed. Raises ConfigError for what is wrong beforehand."""
    from cluster.bench.serve.report import plot, print_report, request_rows, summarise
    from cluster.simulate.report import check_plot

    check_json_path(args.json)
    check_plot(args.plot)
    sessions = make_sessions(args)
    args.endpoint = args.endpoint or ("chat" if args.workload == "conversations" else "completions")
    done = asyncio.run(send(args, sessions))
    summary = summarise(done)
    title = describe(args, sessions)
    print_report(title, summary)
    settings = {name: value for name, value in vars(args).items() if name not in ("run", "api_key")}
    if args.rate is not None and math.isinf(args.rate):
        settings["rate"] = "inf"  # JSON has no infinity
    write_json(args.json, {"settings": settings, "summary": summary, "requests": request_rows(done)})
    if args.plot:
        plot(args.plot, title, done)
    return 0 if summary["completed"] == summary["requests"] else 1


async def send(args: argparse.Namespace, sessions: list[Session]) -> Run:
    from cluster.bench.serve.client import Endpoint
    from cluster.bench.serve.generator import send, warm_up
    from cluster.progress_bar import progress_bar

    timed = args.rate is not None or args.speed is not None
    async with Endpoint(
        args.url, args.endpoint, args.model, args.api_key, extra_members(args), args.timeout
    ) as endpoint:
        args.model = endpoint.model
        await warm_up(endpoint, sessions, args.warm_up)
        with progress_bar(sum(len(session.turns) for session in sessions), shown=True) as bar:
            return await send(endpoint, sessions, None if timed else args.concurrency or DEFAULT_CONCURRENCY, bar)


def extra_members(args: argparse.Namespace) -> dict[str, Any]:
    """What each body holds beside prompt, model and length. Raises ConfigError."""
    try:
        extra = json.loads(args.extra_body or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {args.extra_body}")
    return {"temperature": args.temperature} | ({"ignore_eos": True} if args.ignore_eos else {}) | extra


def make_sessions(args: argparse.Namespace) -> list[Session]:
    """The load. Raises ConfigError."""
    from cluster.bench.serve.sessions import from_trace, load_conversations
    from cluster.simulate.synthetic import Lengths, SyntheticSpec, synthetic_trace
    from cluster.simulate.traces import load_trace

    if (args.file is None) == (args.workload in FROM_FILE):
        raise ConfigError(f"--workload {args.workload} {'needs a' if args.file is None else 'reads no'} --file")
    if args.speed is not None and (args.workload != "mooncake" or args.rate is not None or args.concurrency):
        raise ConfigError("--speed is for mooncake traces, and instead of --rate and --concurrency")
    if args.think_time < 0 or args.warm_up < 0:
        raise ConfigError("--think-time and --warm-up must not be negative")
    rate = math.inf if args.rate is None else args.rate
    if args.workload == "conversations":
        return load_conversations(Path(args.file).expanduser(), args.requests, rate, args.think_time, args.seed)
    if args.workload == "mooncake":
        if args.rate is not None:
            raise ConfigError("a mooncake trace has its own arrival times: use --speed, or --concurrency")
        path = Path(args.file).expanduser()
        return from_trace(load_trace(path, args.requests, math.inf, 0.0, args.seed, args.speed or 1.0))
    spec = SyntheticSpec(
        requests=args.requests or DEFAULT_REQUESTS,
        rate=rate,
        prompt=Lengths.parse(args.prompt_len),
        output=Lengths.parse(args.output_len),
        prefix_len=args.prefix_len if args.workload == "shared-prefix" else 0,
        prefix_groups=args.prefix_groups,
        turns=args.turns if args.workload == "multi-turn" else 1,
        think_time=args.think_time,
        seed=args.seed,
    )
    return from_trace(synthetic_trace(spec))


def describe(args: argparse.Namespace, sessions: list[Session]) -> str:
    """The title of table and plot."""
    if args.speed is not None:
        pace = f"at the trace's times x {args.speed:g}"
    elif args.rate is not None:
        pace = f"{args.rate:g} requests a second"
    else:
        pace = f"{args.concurrency or DEFAULT_CONCURRENCY} side by side"
    name = args.workload if args.file is None else f"{args.workload} {Path(args.file).name}"
    return f"{name}, {pace}: {len(sessions):,} sessions to {args.model} at {args.url} ({args.endpoint})"
