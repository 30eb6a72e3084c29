"""`raydix simulate`: the real scheduler over a trace in virtual time; no model, no GPU, no Ray."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.cli.flags import positive_float, positive_int
from cluster.cli.output import check_json_path, write_json
from cluster.cli.simulate_real import calibrate, differences, run_real
from cluster.errors import ConfigError
from cluster.routing import DEFAULT_BETA

if TYPE_CHECKING:
    from cluster.simulate.cost_model import ModelShape, StepCost
    from cluster.simulate.fleet import FleetSpec
    from cluster.simulate.metrics import RunResult
    from cluster.simulate.traces import Trace
    from scheduler.config import SchedulerConfig

DEFAULT_MODEL = "Llama-3.1-8B"
POLICY_ALIASES = {"cache": "longest_prefix", "fair": "fair_share"}


def add_parser(commands: Any) -> None:
    """Adds the command to `commands`, an argparse sub-parser collection."""
    parser = commands.add_parser(
        "simulate",
        help="what a policy, a router or a card would do to a trace, in virtual time",
        description="Drives the real scheduler with a worker that only knows how long steps take. Requests come from "
        "a trace file or are made up. Several policies or routers, separated by commas, run on the same trace.",
    )
    add_trace_flags(parser.add_argument_group("trace"))
    add_machine_flags(parser.add_argument_group("machine and engine"))
    output = parser.add_argument_group("what to do and to write")
    output.add_argument("--json", metavar="FILE", help="write settings and results into FILE as JSON")
    output.add_argument("--plot", metavar="FILE", help="draw the runs into FILE (PNG); needs matplotlib")
    output.add_argument("--jobs", type=positive_int, default=1, help="processes that share the replicas (default: 1)")
    output.add_argument("--calibrate", metavar="FILE", help="measure the CPU engine, write its cost model, and end")
    output.add_argument(
        "--compare-real", action="store_true", help="also serve the trace with the CPU engine; needs --calibration"
    )
    output.add_argument(
        "--clock", choices=("cpu", "wall"), default="wall",
        help="of --compare-real; cpu: what else runs on the machine does not count (default: %(default)s)",
    )  # fmt: skip
    output.add_argument("--repeats", type=positive_int, default=3, help="of measurements (default: %(default)s)")
    parser.set_defaults(run=run)


def add_trace_flags(group: Any) -> None:
    lengths = "N, uniform:A:B, exp:MEAN or lognormal:MEAN:SIGMA"
    group.add_argument("--trace", metavar="FILE", help="ShareGPT JSON or Mooncake JSON lines; default: made up")
    group.add_argument("--requests", type=positive_int, help="requests (default: 1000, or the whole file)")
    group.add_argument(
        "--rate", type=positive_float, default=10.0, help="arrivals a second; inf (default: %(default)s)"
    )
    group.add_argument("--speed", type=positive_float, default=1.0, help="of a file's arrival times (default: 1)")
    group.add_argument("--prompt-len", default="lognormal:512:1", help=f"{lengths} (default: %(default)s)")
    group.add_argument("--output-len", default="lognormal:200:0.8", help=f"{lengths} (default: %(default)s)")
    group.add_argument("--prefix-len", type=int, default=0, help="tokens that a group's prompts share (default: 0)")
    group.add_argument("--prefix-groups", type=positive_int, default=1, help="such groups (default: 1)")
    group.add_argument("--prefix-share", type=float, default=1.0, help="share of sessions in a group (default: 1)")
    group.add_argument("--turns", type=positive_int, default=1, help="requests in a conversation (default: 1)")
    group.add_argument("--think-time", type=float, default=5.0, help="mean seconds before the next turn (default: 5)")
    group.add_argument("--users", type=int, default=0, help="user keys that the requests are spread over (default: 0)")
    group.add_argument("--seed", type=int, default=0, help="of the trace and the router (default: %(default)s)")


def add_machine_flags(group: Any) -> None:
    group.add_argument(
        "--model", help=f"a shape of cluster/presets.py or a checkpoint's directory (default: {DEFAULT_MODEL}, or "
        "with a CPU engine the default model)",
    )  # fmt: skip
    group.add_argument("--card", default="H200", help="H200, H100, ... (default: %(default)s)")
    group.add_argument("--calibration", metavar="FILE", help="cost model from --calibrate instead of a card's")
    group.add_argument("--tp-size", type=positive_int, default=1, help="cards per replica (default: 1)")
    group.add_argument("--replicas", type=positive_int, default=1, help="(default: 1)")
    group.add_argument("--router", default="power_of_two", help="random, power_of_two, affinity, cache_aware (or a,b)")
    group.add_argument("--router-beta", type=float, default=DEFAULT_BETA, help="of cache_aware (default: %(default)s)")
    group.add_argument("--report-interval", type=positive_float, default=0.1, help="s between reports to the router")
    group.add_argument("--policy", default="fcfs", help="fcfs, cache, priority, fair (several: a,b; default: fcfs)")
    group.add_argument("--page-size", type=positive_int, default=16, help="(default: %(default)s)")
    group.add_argument("--num-pages", type=positive_int, help="KV pages per replica; default: what the card holds")
    group.add_argument("--max-running-requests", type=positive_int, help="(default: 256; CPU engine: 16)")
    group.add_argument("--max-seq-len", type=positive_int, help="default: the longest request, up to the model's limit")
    group.add_argument("--max-step-tokens", type=positive_int, help="(default: 2048; CPU engine: 256)")
    group.add_argument("--overlap-depth", type=positive_int, default=2, help="(default: %(default)s)")
    group.add_argument("--cache-type", choices=("radix", "naive"), default="radix", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Simulates (or calibrates) and prints. Raises ConfigError for whatever is wrong with flags and files."""
    from cluster.simulate.report import check_plot, plot, print_report

    check_json_path(args.json)
    check_plot(args.plot)
    if args.calibrate:
        return calibrate(args)
    policies, routers = chosen(args)
    if args.compare_real and not args.calibration:
        raise ConfigError("--compare-real needs --calibration FILE, made by --calibrate FILE on this machine")
    trace = make_trace(args)
    cost, model, num_pages = make_cost(args)
    config = scheduler_config(args, trace, model, num_pages, cpu=bool(args.calibration))
    results = []
    for policy in policies:
        for router in routers:
            results.append(simulate_one(args, trace, config, policy, router, cost, model))
    settings = {name: value for name, value in vars(args).items() if name != "run"}
    settings |= {"num_pages": config.num_pages, "max_seq_len": config.max_seq_len}
    title = describe(args, trace, config)
    report = {"settings": finite(settings)}
    if args.compare_real:
        measured = run_real(args, trace, replace(config, policy=policies[0]))
        report["difference"] = differences(results[0], measured)
        results += measured
    print_report(title, results)
    for name, value in report.get("difference", {}).items():
        print(f"{name:24} {value:+.1%} (prediction against the median run)")
    write_json(args.json, report | {"runs": [{"label": r.label} | r.summary() for r in results]})
    if args.plot:
        plot(args.plot, title, results)
    return 0


def make_trace(args: argparse.Namespace) -> Trace:
    from cluster.simulate.synthetic import Lengths, SyntheticSpec, synthetic_trace
    from cluster.simulate.traces import load_trace

    if args.think_time < 0 or args.prefix_len < 0 or args.users < 0:
        raise ConfigError("--think-time, --prefix-len and --users must not be negative")
    if not 0 <= args.prefix_share <= 1:
        raise ConfigError(f"--prefix-share must lie in 0..1, got {args.prefix_share}")
    if args.trace:
        path = Path(args.trace).expanduser()
        return load_trace(path, args.requests, args.rate, args.think_time, args.seed, args.speed)
    return synthetic_trace(
        SyntheticSpec(
            requests=args.requests or 1000,
            rate=args.rate,
            prompt=Lengths.parse(args.prompt_len),
            output=Lengths.parse(args.output_len),
            prefix_len=args.prefix_len,
            prefix_groups=args.prefix_groups,
            prefix_share=args.prefix_share,
            turns=args.turns,
            think_time=args.think_time,
            users=args.users,
            seed=args.seed,
        )
    )


def make_cost(args: argparse.Namespace) -> tuple[StepCost, ModelShape | None, int | None]:
    """The cost model, the model's shape (None: only the calibration file knows), and the KV pages that fit."""
    import json

    from cluster.presets import PRESETS
    from cluster.simulate.cost_model import CARDS, CalibratedCost, ModelShape, RooflineCost

    if args.calibration:
        return CalibratedCost.load(Path(args.calibration).expanduser()), None, args.num_pages
    if args.card not in CARDS:
        raise ConfigError(f"unknown card {args.card!r}; known are {', '.join(CARDS)}; a CPU needs --calibration FILE")
    name = args.model or DEFAULT_MODEL
    config = PRESETS.get(name)
    if config is None:
        file = Path(name).expanduser() / "config.json"
        if not file.is_file():
            raise ConfigError(f"--model {name}: no such directory with a config.json; shapes: {', '.join(PRESETS)}")
        config = json.loads(file.read_text())
    try:
        model = ModelShape.from_config(config)
    except KeyError as error:
        raise ConfigError(f"--model {name}: config.json lacks {error}: not a dense Llama-like model") from error
    cost = RooflineCost(model, CARDS[args.card], args.tp_size)
    return cost, model, args.num_pages or cost.num_pages(args.page_size)


def scheduler_config(
    args: argparse.Namespace, trace: Trace, model: ModelShape | None, num_pages: int | None, cpu: bool
) -> SchedulerConfig:
    from scheduler.config import SchedulerConfig

    running = args.max_running_requests or (16 if cpu else 256)
    longest = max(request.prompt_len + request.output_len for request in trace.requests)
    max_seq_len = args.max_seq_len or min(longest, model.max_seq_len if model else longest)
    try:
        return SchedulerConfig(
            num_pages=num_pages or running * -(-max_seq_len // args.page_size),
            page_size=args.page_size,
            max_running_requests=running,
            max_seq_len=max_seq_len,
            max_step_tokens=args.max_step_tokens or (256 if cpu else 2048),
            cache_type=args.cache_type,
            overlap_depth=args.overlap_depth,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def chosen(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The policies and the routers to run. Raises ConfigError for an unknown one."""
    from cluster.simulate.routers import ROUTERS
    from scheduler.policies import POLICIES

    policies = [POLICY_ALIASES.get(name, name) for name in names(args.policy)]
    routers = names(args.router)
    for kind, given, known in (
        ("policy", policies, [*POLICIES, *POLICY_ALIASES]),
        ("router", routers, list(ROUTERS)),
    ):
        unknown = [name for name in given if name not in known]
        if unknown or not given:
            raise ConfigError(f"unknown {kind} {unknown[0] if unknown else ''!r}; known are {', '.join(known)}")
    return policies, routers


def names(text: str) -> list[str]:
    """The names in a comma-separated list."""
    return [name for name in (part.strip() for part in text.split(",")) if name]


def simulate_one(
    args: argparse.Namespace, trace: Trace, config: SchedulerConfig, policy: str, router: str, cost: StepCost,
    model: ModelShape | None,
) -> RunResult:  # fmt: skip
    from cluster.simulate.engine import ScriptedWorker
    from cluster.simulate.fleet import simulate

    spec = fleet_spec(args, replace(config, policy=policy), router, cost, model)
    label = f"{policy}, {router}" if args.replicas > 1 else policy
    return simulate(label, trace, spec, partial(ScriptedWorker, cost, config.max_running_requests, spec.vocab_size))


def fleet_spec(
    args: argparse.Namespace, config: SchedulerConfig, router: str, cost: StepCost, model: ModelShape | None
) -> FleetSpec:
    from cluster.simulate.fleet import FleetSpec

    vocab_size = model.vocab_size if model else cost.vocab_size
    return FleetSpec(
        config,
        vocab_size,
        args.replicas,
        args.tp_size,
        router,
        args.report_interval,
        args.seed,
        args.jobs,
        args.router_beta,
    )


def describe(args: argparse.Namespace, trace: Trace, config: SchedulerConfig) -> str:
    """The title of table and plot."""
    machine = f"calibrated CPU ({Path(args.calibration).name})" if args.calibration else (
        f"{args.model or DEFAULT_MODEL} on {args.replicas} replica(s) of {args.tp_size} x {args.card}"
    )  # fmt: skip
    return (
        f"{trace.name}: {len(trace.requests):,} requests, {trace.prompt_tokens:,} prompt and "
        f"{trace.output_tokens:,} output tokens; {machine}, {config.num_pages:,} pages of {config.page_size}"
    )


def finite(settings: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in settings.items()}
