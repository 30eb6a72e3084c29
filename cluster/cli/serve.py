"""`raydix serve`: the OpenAI API on this machine or on a Ray cluster, until it is told to stop or the engine fails."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.cli.flags import add_engine_flags, engine_config
from cluster.cli.output import Timeline
from cluster.config import EngineConfig
from cluster.errors import ConfigError, EngineDeadError, EngineError, StartupError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

APP_NAME = "raydix"
POLL_SECONDS = 0.5
STATUS_TIMEOUT = 10.0
READY_TIMEOUT = 60.0  # from a running application to a good answer of /ready


def add_parser(commands: Any) -> None:
    """Adds the command to `commands`, an argparse sub-parser collection."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP (OpenAI API)",
        description="Serves a model over HTTP (OpenAI API). Ctrl-C or SIGTERM stops it with exit code 0; exit code 1: "
        "it could not start or the engine failed, 2: a setting or the model is wrong.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port_number, default=8000, help="port to listen on (default: %(default)s)")
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
    """Within the block SIGINT and SIGTERM raise `error` in the main thread, once; later ones are ignored.

    Yields a function that takes the signals again, for after a library put its own handlers in place.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    arrived = False

    def handle(number: int, frame: Any) -> None:
        nonlocal arrived
        arrived = True
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # the clean-up that follows must not be cut short
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
            watch(engine)
        finally:
            take_down(keep_serve=was_running)
    finally:
        runtime.close()


def check_text(path: Path) -> None:
    """Raises ModelLoadError unless the checkpoint has what an ingress needs, which would say so much later."""
    from cluster.tokenizer import Tokenizer

    tokenizer = Tokenizer(path)
    _ = tokenizer.chat_template, tokenizer.eos_token_ids


def take_down(keep_serve: bool) -> None:
    """Ends the application, and Serve unless it was there before or others use it by now."""
    from ray import serve

    try:
        if keep_serve or set(serve.status().applications) - {APP_NAME}:
            serve.delete(APP_NAME)
        else:
            serve.shutdown()
    except Exception as error:  # a Ray that is broken must not hide what broke it
        print(f"raydix: clean-up: {error}", file=sys.stderr, flush=True)


def deploy(config: EngineConfig, timeline: Timeline) -> DeploymentHandle:
    """Deploys the application; returns the engine deployment's handle when its engine is up.

    Raises:
        ConfigError, StartupError: what the engine said.
    """
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from cluster.serve import build_openai_app

    timeline(f"starting {config.tp_size} worker{'s' if config.tp_size > 1 else ''} and loading the model")
    try:
        # the replicas' own log shows how loading goes on; a line for each request would bury it
        serve.run(build_openai_app(config), name=APP_NAME, logging_config=LoggingConfig(enable_access_log=False))
    except RuntimeError as error:
        raise startup_error(deployment_messages() or str(error)) from error
    return serve.get_deployment_handle("engine", APP_NAME)


def deployment_messages() -> str:
    """What Serve knows of deployments that did not come up: the traceback of their constructor."""
    from ray import serve

    application = serve.status().applications.get(APP_NAME)
    deployments = application.deployments.values() if application else ()
    return "\n".join(deployment.message for deployment in deployments if deployment.status != "HEALTHY")


def startup_error(text: str) -> Exception:
    """The error named at the end of a remote traceback as an error of the same kind, without the traceback."""
    from cluster import errors

    lines = text.splitlines()
    for number in range(len(lines) - 1, -1, -1):
        name, colon, message = lines[number].strip().partition(": ")
        kind = getattr(errors, name.rpartition(".")[2], None)
        if colon and isinstance(kind, type) and issubclass(kind, (ConfigError, EngineError)):
            return kind("\n".join([message, *lines[number + 1 :]]).strip())
    return StartupError(text.strip())


def wait_until_ready(engine: DeploymentHandle, host: str, port: int) -> None:
    """Returns when GET /ready answers 200.

    Raises:
        EngineError: the engine failed meanwhile, or it was not ready within READY_TIMEOUT seconds.
    """
    deadline = time.monotonic() + READY_TIMEOUT
    while (problem := readiness_problem(host, port)) is not None:
        check_engine(engine)
        if time.monotonic() > deadline:
            raise StartupError(
                f"the application runs, but http://{host}:{port}/ready is not well after {READY_TIMEOUT:g} s: "
                f"{problem}. Does Ray Serve already run on this cluster with another host or port?"
            )
        time.sleep(POLL_SECONDS / 5)


def readiness_problem(host: str, port: int) -> str | None:
    """None if GET /ready answers 200, else what it answers instead."""
    try:
        with urllib.request.urlopen(f"http://{reachable(host)}:{port}/ready", timeout=5):
            return None
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read(1000).decode(errors='replace')}"
    except OSError as error:
        return str(error)


def reachable(host: str) -> str:
    """The address under which this machine reaches a server that listens on `host`."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def check_engine(engine: DeploymentHandle) -> dict[str, Any]:
    """The engine's status.

    Raises:
        EngineDeadError: it has failed, or its process does not answer.
    """
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        status = engine.status.remote().result(timeout_s=STATUS_TIMEOUT)
    except (RayError, RayServeException, TimeoutError) as error:
        raise EngineDeadError(f"the engine's process does not answer: {error}") from error
    if status["failure"] is not None:
        raise EngineDeadError(f"the engine has failed: {status['failure']}")
    return status


def watch(engine: DeploymentHandle) -> None:
    """Never returns: raises EngineDeadError once the engine has failed."""
    never = threading.Event()
    while not never.wait(POLL_SECONDS):
        check_engine(engine)


def print_usage(engine: DeploymentHandle, host: str, port: int) -> None:
    """The effective settings, the engine's start-up phases and a request to try, on stderr."""
    info = engine.info.remote().result(timeout_s=STATUS_TIMEOUT)
    settings = ", ".join(f"{name}={info[name]}" for name in EngineConfig.model_fields)
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in info["startup_seconds"].items())
    body = {
        "model": info["served_model_name"],
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    print(
        f"settings: {settings}\nengine: {phases}\ntry it:\n  curl http://{reachable(host)}:{port}/v1/chat/completions "
        f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'",
        file=sys.stderr,
        flush=True,
    )
