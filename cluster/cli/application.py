"""The Serve application of `raydix serve`: deployed, watched, drained, taken down."""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from cluster.cli.output import Timeline
from cluster.config import EngineConfig
from cluster.deadline import within
from cluster.errors import ConfigError, EngineDeadError, EngineError, StartupError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from cluster.ray_runtime import RayRuntime

APP_NAME = "raydix"
POLL_SECONDS = 0.5
STATUS_TIMEOUT = 10.0
READY_TIMEOUT = 60.0  # from a running application to a good answer of /ready
TAKE_DOWN_TIMEOUT = 60.0
DRAIN_MARGIN = 10.0  # beyond the grace period, for the answer that it is over


class EngineSilentError(EngineError):
    """The engine's process does not answer."""


def take_down(keep_serve: bool) -> None:
    """Ends the application, and Serve unless it was there before or others use it by now."""
    from ray import serve

    def end() -> None:
        if keep_serve or set(serve.status().applications) - {APP_NAME}:
            serve.delete(APP_NAME)
        else:
            serve.shutdown()

    try:
        within(TAKE_DOWN_TIMEOUT, end)
    except Exception as error:  # a Ray that is broken must not hide what broke it
        print(f"raydix: clean-up: {error}", file=sys.stderr, flush=True)


def drain(grace: float) -> None:
    """No new requests from now on; returns when those that run have ended, or after `grace` seconds with an error."""
    from ray import serve

    print(f"raydix: finishing what runs, within {grace:g} s; a second signal ends at once", file=sys.stderr, flush=True)
    try:
        ingress = serve.get_deployment_handle("ingress", APP_NAME)
        cut = ingress.drain.remote(grace).result(timeout_s=grace + DRAIN_MARGIN)
    except Exception as error:  # what is broken cannot finish anything
        print(f"raydix: {error}", file=sys.stderr, flush=True)
    else:
        if cut:
            print(f"raydix: {cut} requests did not end in time", file=sys.stderr, flush=True)


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


def check_engine(engine: DeploymentHandle) -> None:
    """Raises EngineDeadError if the engine has failed, EngineSilentError if its process does not answer."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    from cluster.ray_errors import explain

    try:
        status = engine.status.remote().result(timeout_s=STATUS_TIMEOUT)
    except (RayError, RayServeException, TimeoutError) as error:
        raise EngineSilentError(f"the engine's process does not answer: {explain(error)}") from error
    if status["failure"] is not None:
        raise EngineDeadError(f"the engine has failed: {status['failure']}")


def watch(engine: DeploymentHandle, runtime: RayRuntime, patience: float) -> None:
    """Never returns: raises EngineDeadError once the engine has failed.

    An engine whose process is gone is replaced by Serve, and its requests wait: for `patience` seconds.
    """
    never = threading.Event()
    heard = time.monotonic()
    while not never.wait(POLL_SECONDS):
        try:
            check_engine(engine)
            heard = time.monotonic()
        except EngineSilentError as error:
            if runtime.lost or time.monotonic() - heard > patience:
                raise EngineDeadError(f"Ray has ended: {runtime.lost}" if runtime.lost else str(error)) from error


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
