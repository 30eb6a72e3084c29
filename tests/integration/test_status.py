"""`raydix status` of an application with two replicas, deployed from one of the files we ship."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

ADDRESS = ("--ray-address", "127.0.0.1:1")


@pytest.mark.full_grid
def test_two_replicas_of_a_shipped_file(tmp_path: Path) -> None:
    """In a process of its own: a process can be connected to one Ray only."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    child = subprocess.run(
        [sys.executable, "-m", "tests.integration.status_app", str(tmp_path), str(port)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert child.returncode == 0 and child.stdout.endswith("done\n"), child.stdout + child.stderr[-4000:]


def test_nothing_to_show() -> None:
    child = subprocess.run(
        [sys.executable, "-c", "import sys; from cluster.cli import main; sys.exit(main())", "status", *ADDRESS],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 1
    assert "no Ray answers at 127.0.0.1:1" in child.stderr
