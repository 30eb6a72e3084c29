"""Which front can be had, and what it takes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from cluster.errors import ConfigError
from cluster.front import free_port, prepare


@pytest.mark.parametrize(
    ("host", "address", "says"),
    [("127.0.0.1", "local", "--host 0.0.0.0"), ("0.0.0.0", "10.0.0.1:6379", "RAY_SERVE_ENABLE_HA_PROXY=1")],
)
def test_what_cannot_be_had_says_how_it_can(host: str, address: str, says: str) -> None:
    before = dict(os.environ)
    with pytest.raises(ConfigError, match=says):
        prepare("haproxy", host, address)
    prepare("proxy", host, address)
    assert os.environ == before


def test_serve_sees_the_switches() -> None:
    script = (
        "from cluster.front import prepare; prepare('haproxy', '0.0.0.0', 'local')\n"
        "import os\n"
        "from ray.serve._private import constants as c\n"
        "print(c.RAY_SERVE_ENABLE_HA_PROXY, c.RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP,"
        " os.environ['RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP'], c.RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "True", "0", "3.0"]


def test_a_port_that_is_taken_is_left_to_its_owner() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        other = free_port(port)
        assert other not in (0, port)
    assert free_port(port) == port
