"""`raydix serve`: the OpenAI API on this machine or on a Ray cluster, until it is told to stop or the engine fails."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.cli.application import APP_NAME, deploy, drain, print_usage, take_down, wait_until_ready, watch
from cluster.cli.flags import add_engine_flags, engine_config
from cluster.cli.output import Timeline
from cluster.config import EngineConfig
from cluster.errors import ConfigError, EngineError
from cluster.front import FRONTS, prepare
from cluster.local_processes import kill_descendants


def add_parser(commands: Any) -> None:
    """Adds the command to `commands`, an argparse sub-parser collection."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP (OpenAI API)",
        description="Serves a model over HTTP (OpenAI API). Ctrl-C or SIGTERM finishes what runs and stops it with "
        "exit code 0, a second one ends it at once; exit code 1: it could not start or the engine failed, 2: a setting "
        "or the model is wrong.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port_number, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--front", choices=FRONTS, default="proxy", help="haproxy: tokens cost less than behind Serve's own proxy"
    )
    add_engine_flags(parser, positional_model=True)
    parser.set_defaults(run=run)


def port_number(text: str) -> int:
    """For argparse: a TCP port."""
    value = int(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is not a port (1 to 65535)")
    return value


class StopRequested(BaseException):
    """SIGINT or SIGTERM arrived; no Exception, so that nothing on the way swallows it."""


def run(args: argparse.Namespace) -> int:
    """Serves until a signal (returns 0) or until the engine fails (raises).

    Raises:
        ConfigError: a setting is wrong, or the port is taken.
        EngineError: it did not start, or the engine failed while serving.
    """
    config = engine_config(args)
    check_port_free(args.host, args.port)
    prepare(args.front, args.host, config.ray_address)
    timeline = Timeline()
    try:
        with signals_raise(StopRequested) as take_signals:
            serve_until_failure(config, args.host, args.port, timeline, take_signals)
    except StopRequested:
        timeline.done()
        print("raydix: stopped", file=sys.stderr, flush=True)
    return 0


def check_port_free(host: str, port: int) -> None:
    """Raises ConfigError if something listens on the port already, or the address is not this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port or --host"
        ) from error


@contextmanager
def signals_raise(error: type[BaseException]) -> Iterator[Callable[[], None]]:
    """Within the block SIGINT or SIGTERM raises `error` in the main thread. The next one ends this process at once, and
    a private Ray with it; the exit code is 128 + its number.

    Yields a function that takes the signals again, for after a library put its own handlers in place.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    arrived = False

    def handle(number: int, frame: Any) -> None:
        nonlocal arrived
        if arrived:
            kill_descendants()  # Ray's agents would outlive it for a minute
            os._exit(128 + number)
        arrived = True
        raise error

    def take() -> None:
        for each in numbers:
            signal.signal(each, handle)

    before = {number: signal.getsignal(number) for number in numbers}
    take()
    try:
        yield take
    except Exception as other:
        if arrived:  # raised within a C function, `error` may come out as something else (SystemError)
            raise error from other
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve_until_failure(
    config: EngineConfig, host: str, port: int, timeline: Timeline, take_signals: Callable[[], None]
) -> None:
    """Starts everything, watches the engine, and takes everything down again however it ends."""
    from cluster.model_files import resolve_model, served_name

    # here and not in the replica: a wrong model is found out early, and a download shows its progress
    path = resolve_model(config.model, timeline, config.cache_dir, config.load_format == "dummy")
    check_text(path)
    config = config.model_copy(
        update={"model": str(path), "served_model_name": config.served_model_name or served_name(config.model)}
    )
    timeline("importing Ray")
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from cluster.ray_runtime import connect

    logging.getLogger("ray.serve").setLevel(logging.WARNING)

    timeline("starting Ray")
    runtime = connect(config.ray_address, min_cpus=config.tp_size + 1)
    try:
        take_signals()  # Ray's own handler of SIGTERM aborts the process
        timeline("starting Ray Serve")
        quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
        was_running = bool(serve.status().proxies)
        serve.start(http_options={"host": host, "port": port}, logging_config=quiet)
        if APP_NAME in serve.status().applications:
            raise ConfigError(
                f"an application named {APP_NAME} is served on this Ray cluster already; stop it first, or use "
                "--ray-address local for a Ray of its own"
            )
        try:
            engine = deploy(config, timeline)
            wait_until_ready(engine, host, port)
            timeline(f"ready on http://{host}:{port}")
            timeline.done()
            print_usage(engine, host, port)
            try:
                watch(engine, runtime, max(config.replica_timeout, config.start_timeout))
            except StopRequested:
                drain(config.drain_timeout)
                raise
        finally:
            if runtime.lost is None:
                take_down(keep_serve=was_running)
    except EngineError:
        logs = runtime.close(keep_logs=True)
        if logs is not None:
            print(f"raydix: Ray's logs are kept in {logs}", file=sys.stderr, flush=True)
        raise
    finally:
        runtime.close()


def check_text(path: Path) -> None:
    """Raises ModelLoadError unless the checkpoint has what an ingress needs, which would say so much later."""
    from cluster.tokenizer import Tokenizer

    tokenizer = Tokenizer(path)
    _ = tokenizer.chat_template, tokenizer.eos_token_ids
