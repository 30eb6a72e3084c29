"""What takes HTTP connections in front of the ingresses: Serve's proxy, or HAProxy, which comes with Ray on Linux.

Serve's proxy is a Python process that passes on every chunk. HAProxy passes bytes and needs no Python, so a token costs
less than half (docs/performance.md), and what a client does not read holds up the ingress, which then gives the client
up after `slow_reader_timeout`. Ray decides between them by its environment when it starts.
"""

from __future__ import annotations

import os
import socket
import sys

from cluster.errors import ConfigError

FRONTS = ("proxy", "haproxy")
ALL_INTERFACES = "0.0.0.0"
_HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
# Seconds that an ingress which ends stays reachable: HAProxy needs half a second to know. The default, 30 s, is for the
# load balancers of clouds, and every stop took as long.
_DRAINING = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3"}
# Where HAProxy shows its own state, whatever port it serves: a second one on this machine would not start.
_OWN_PORTS = {"RAY_SERVE_HAPROXY_METRICS_PORT": 9101, "RAY_SERVE_HAPROXY_STATS_PORT": 8404}
# One event loop for our code, Serve's and its router: the fastest of the combinations behind HAProxy.
_ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}


def prepare(front: str, host: str, ray_address: str) -> None:
    """Set Ray's switches for the private Ray that this process starts next. Call it before ray.serve is imported.

    Raises:
        ConfigError: HAProxy cannot be had this way.
    """
    if front == "proxy":
        return
    if host != ALL_INTERFACES:
        raise ConfigError(
            f"--front haproxy: Ray lets replicas listen on all interfaces then, so --host {host} would promise what is "
            f"not so; use --host {ALL_INTERFACES}, with --api-key where others can reach this machine"
        )
    if ray_address != "local":
        switches = " ".join(f"{name}={value}" for name, value in (_HAPROXY | _ONE_LOOP).items())
        raise ConfigError(
            f"--front haproxy needs --ray-address local; for a cluster start Ray with {switches} in its environment, "
            "on every node"
        )
    if "ray.serve" in sys.modules:
        raise ConfigError("--front haproxy: Ray Serve is in use in this process already")
    defaults = _DRAINING | {name: str(free_port(port)) for name, port in _OWN_PORTS.items()}
    os.environ.update(_HAPROXY | {name: value for name, value in defaults.items() if name not in os.environ})
    import ray.serve  # reads its switches now: this process has no event loop that its routers could share  # noqa: F401

    os.environ.update(_ONE_LOOP)


def free_port(wanted: int) -> int:
    """This TCP port if nothing listens on it, another otherwise."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ALL_INTERFACES, wanted))
        except OSError:
            probe.bind((ALL_INTERFACES, 0))
        return probe.getsockname()[1]
