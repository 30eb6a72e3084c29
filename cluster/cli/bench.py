"""`raydix bench`: load on a server, throughput of the engine next to transformers', costs of scheduler and cache."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cluster.cli import bench_collectives, bench_router, bench_serve
from cluster.cli.flags import add_engine_flags, engine_config, positive_int
from cluster.cli.output import Timeline, cell, check_json_path, print_table, write_json
from cluster.config import EngineConfig
from cluster.errors import ConfigError
from cluster.front import ALL_INTERFACES, FRONTS, prepare

SERVING_PATH_COLUMNS = (
    "path", "streams", "tokens_per_s", "tokens_per_chunk", "itl_p50_ms", "itl_p99_ms", "ttft_p50_ms",
    "cpu_us_per_token", "client_cpu_us_per_token",
)  # fmt: skip


def add_parser(commands: Any) -> None:
    """Adds the command and its sub-commands to `commands`, an argparse sub-parser collection."""
    parser = commands.add_parser("bench", help="measure throughput, scheduler and prefix cache")
    kinds = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    bench_serve.add_parser(kinds)
    bench_router.add_parser(kinds)
    add_serving_path(kinds)
    add_throughput(kinds)
    add_latency(kinds)
    add_prefix(kinds)
    add_transformers(kinds)
    bench_collectives.add_parser(kinds)
    add_scheduler(kinds)
    add_cache(kinds)


def add_serving_path(kinds: Any) -> None:
    parser = kinds.add_parser(
        "serving-path",
        help="what HTTP and Ray cost a token, next to the usual way of streaming from Ray",
        description="Serves with a fake engine (--device fake) and sends streams to it, and to a minimal Ray Serve "
        "application that streams each token from an actor's generator.",
    )
    parser.add_argument(
        "--streams", type=positive_int, nargs="+", default=[1, 16, 64, 256], help="(default: 1 16 64 256)"
    )
    parser.add_argument("--output-len", type=positive_int, default=128, help="tokens a stream (default: %(default)s)")
    parser.add_argument("--front", choices=FRONTS, default="proxy", help="as of raydix serve (default: %(default)s)")
    finish(parser, run_serving_path, engine=True)


def add_throughput(kinds: Any) -> None:
    parser = kinds.add_parser(
        "throughput",
        help="offline tokens per second on a random workload",
        description="Generates for random prompts with lengths uniform between --min-len and --max-len, EOS ignored.",
    )
    parser.add_argument("--num-seqs", type=positive_int, default=32, help="requests (default: %(default)s)")
    parser.add_argument(
        "--min-len", type=positive_int, default=16, help="shortest prompt and output (default: %(default)s)"
    )
    parser.add_argument(
        "--max-len", type=positive_int, default=128, help="longest prompt and output (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of lengths and ids (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.6, help="(default: %(default)s)")
    parser.add_argument(
        "--profile", metavar="FILE", help="write a trace of half a second of one more run; needs --executor inproc"
    )
    finish(parser, run_throughput, engine=True)


def add_latency(kinds: Any) -> None:
    parser = kinds.add_parser("latency", help="milliseconds per token of one request alone")
    parser.add_argument("--context", type=positive_int, default=1150, help="tokens, on average (default: %(default)s)")
    parser.add_argument("--output-len", type=positive_int, default=128, help="tokens timed (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the ids (default: %(default)s)")
    finish(parser, run_latency, engine=True)


def add_prefix(kinds: Any) -> None:
    parser = kinds.add_parser("prefix", help="time to all first tokens of a burst, with and without a shared prefix")
    parser.add_argument("--num-seqs", type=positive_int, default=64, help="requests (default: %(default)s)")
    parser.add_argument("--prefix-len", type=positive_int, default=4096, help="shared tokens (default: %(default)s)")
    parser.add_argument("--own-len", type=positive_int, default=256, help="own tokens of each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the ids (default: %(default)s)")
    finish(parser, run_prefix, engine=True, repeats=False)


def add_transformers(kinds: Any) -> None:
    parser = kinds.add_parser("transformers", help="tokens per second next to transformers' generate")
    parser.add_argument("--batch-sizes", type=positive_int, nargs="+", default=[1, 8], help="(default: 1 8)")
    parser.add_argument("--output-len", type=positive_int, default=64, help="tokens per prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and ids (default: %(default)s)")
    parser.add_argument("--threads", type=positive_int, help="transformers' threads (default: the number of ranks)")
    finish(parser, run_transformers, engine=True)


def add_scheduler(kinds: Any) -> None:
    parser = kinds.add_parser("scheduler", help="CPU time of planning a step, without model and Ray")
    sizes = [64, 256, 1024, 4096]
    parser.add_argument(
        "--running", type=positive_int, nargs="+", default=sizes, help="batch sizes (default: 64 .. 4096)"
    )
    parser.add_argument("--page-size", type=positive_int, default=16, help="(default: %(default)s)")
    finish(parser, run_scheduler, engine=False)


def add_cache(kinds: Any) -> None:
    parser = kinds.add_parser("cache", help="time and memory of the prefix cache")
    sizes = [1_000, 10_000, 100_000]
    parser.add_argument(
        "--nodes", type=positive_int, nargs="+", default=sizes, help="sizes of the tree (default: 1000 10000 100000)"
    )
    finish(parser, run_cache, engine=False)


def finish(parser: argparse.ArgumentParser, run: Any, engine: bool, repeats: bool = True) -> None:
    """The flags that benchmarks share."""
    if engine and repeats:
        parser.add_argument(
            "--repeats", type=positive_int, default=3, help="runs; medians count (default: %(default)s)"
        )
    if engine:
        add_engine_flags(parser, positional_model=True)
    parser.add_argument("--json", metavar="FILE", help="write the result into FILE as JSON")
    parser.set_defaults(run=run)


def undisturbed_config(args: argparse.Namespace) -> EngineConfig:
    """The settings, without what else would be done beside the first requests, and be measured, unless it was asked
    for: spare ranks are not started, and FlashAttention-4, where it can be used, is loaded before."""
    config = engine_config(args)
    undisturbed = {"spare_ranks": False}
    if config.device in ("auto", "cuda") and config.dtype != "float32" and has_flash_attention():
        undisturbed["attention_backend"] = "flash"
    chosen = config.model_fields_set
    return config.model_copy(update={name: value for name, value in undisturbed.items() if name not in chosen})


def has_flash_attention() -> bool:
    """Whether FlashAttention-4 runs on this machine."""
    import torch

    from worker.kernels.flash_prefill import why_not

    return torch.cuda.is_available() and why_not(torch.bfloat16, torch.device("cuda")) is None


def run_serving_path(args: argparse.Namespace) -> int:
    from cluster.bench.serve.paths import compare_paths

    config = undisturbed_config(args)
    if config.device not in ("auto", "fake"):
        raise ConfigError(f"--device {config.device}: this benchmark is of the serving path alone; it uses fake")
    config = config.model_copy(update={"device": "fake"})
    check_json_path(args.json)
    prepare(args.front, ALL_INTERFACES, config.ray_address)
    timeline = Timeline()
    result = compare_paths(config, args.streams, args.output_len, args.repeats, timeline)
    timeline.done()
    print(f"{args.output_len} tokens a stream, behind {result['front']}; median of {args.repeats} run(s)")
    print_table([{key: row[key] for key in SERVING_PATH_COLUMNS} for row in result["rows"]])
    write_json(args.json, result)
    return 0


def run_throughput(args: argparse.Namespace) -> int:
    from cluster.bench.throughput import bench_throughput

    config = undisturbed_config(args)
    check_json_path(args.json)
    if args.min_len > args.max_len:
        raise ConfigError(f"--min-len {args.min_len} must not exceed --max-len {args.max_len}")
    if args.profile is not None and config.executor != "inproc":
        raise ConfigError("--profile traces this process; add --executor inproc, so that the model runs in it")
    check_json_path(args.profile, "--profile")
    timeline = Timeline()
    trace = None if args.profile is None else Path(args.profile).expanduser()
    result = bench_throughput(
        config, args.num_seqs, args.min_len, args.max_len, args.seed, args.temperature, args.repeats, timeline, trace
    )
    timeline.done()
    load = result["workload"]
    print(
        f"uniform {args.min_len}..{args.max_len}, {cell(args.num_seqs)} requests, "
        f"{cell(load['prompt_tokens'])} prompt and {cell(load['output_tokens'])} output tokens, "
        f"median of {args.repeats} run(s)"
    )
    print(f"output  {cell(result['output_tokens_per_s'])} tok/s")
    print(f"total   {cell(result['total_tokens_per_s'])} tok/s")
    print(f"elapsed {cell(result['elapsed_s'])} s, {cell(result['cached_tokens'])} prompt tokens from the cache")
    print_limit(result["limit"])
    if trace is not None:
        busy = "no GPU in it" if result["gpu_busy"] is None else f"GPU busy {result['gpu_busy']:.1%} of it"
        print(f"trace   {trace}: {busy}")
    write_json(args.json, result)
    return 0


def print_limit(limit: dict[str, Any] | None) -> None:
    """The limit and our share of it, or that it is not known."""
    if limit is None:
        print("limit   not known for this device")
        return
    machine = f"{limit['bandwidth_bytes_per_s'] / 1e9:,.0f} GB/s, {limit['peak_flops'] / 1e12:,.2f} TFLOP/s"
    print(f"limit   {cell(limit['output_tokens_per_s'])} tok/s, of which this is {limit['ratio']:.1%}")
    print(f"        ({machine}; {limit['source']})")


def run_latency(args: argparse.Namespace) -> int:
    from cluster.bench.latency import bench_latency

    config = undisturbed_config(args)
    check_json_path(args.json)
    if args.output_len < 2 or args.context <= args.output_len // 2:
        raise ConfigError(f"--output-len {args.output_len} must be at least 2, and --context longer than half of it")
    timeline = Timeline()
    result = bench_latency(config, args.context, args.output_len, args.seed, args.repeats, timeline)
    timeline.done()
    print(f"batch 1, about {args.context} tokens of context, median of {args.repeats} run(s)")
    print(f"decode      {result['ms_per_token']:.3f} ms per token")
    print(f"first token {result['first_token_ms']:.1f} ms")
    limit = result["limit"]
    if limit is not None:
        print(f"limit       {limit['ms_per_token']:.3f} ms per token, {limit['ratio']:.1%} ({limit['source']})")
    write_json(args.json, result)
    return 0


def run_prefix(args: argparse.Namespace) -> int:
    from cluster.bench.prefix import bench_prefix

    config = undisturbed_config(args)
    check_json_path(args.json)
    timeline = Timeline()
    result = bench_prefix(config, args.num_seqs, args.prefix_len, args.own_len, args.seed, timeline)
    timeline.done()
    print(f"{args.num_seqs} requests of {args.prefix_len} shared and {args.own_len} own tokens, all at once")
    print_table(result["bursts"])
    write_json(args.json, result)
    return 0


def run_transformers(args: argparse.Namespace) -> int:
    from cluster.bench.transformers_baseline import compare

    config = undisturbed_config(args)
    check_json_path(args.json)
    timeline = Timeline()
    threads = args.threads or config.tp_size
    result = compare(config, args.batch_sizes, args.output_len, args.seed, args.repeats, threads, timeline)
    timeline.done()
    print_table(result["rows"])
    write_json(args.json, result)
    return 0


def run_scheduler(args: argparse.Namespace) -> int:
    from cluster.bench.scheduler import run_scheduler_bench

    check_json_path(args.json)
    result = run_scheduler_bench(args.running, args.page_size)
    print_table(result["decode"])
    print()
    print_table(result["planning"])
    write_json(args.json, result)
    return 0


def run_cache(args: argparse.Namespace) -> int:
    from cluster.bench.cache import run_cache_bench

    check_json_path(args.json)
    result = run_cache_bench(args.nodes)
    print_table(result["cache"])
    print(f"{result['bytes_per_token']:.1f} bytes per cached token")
    write_json(args.json, result)
    return 0
