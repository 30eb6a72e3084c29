"""The node that holds the ranks dies, over HTTP. Two Ray nodes on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full_grid
@pytest.mark.timeout(600)
def test_service_survives_the_loss_of_its_node(record_property) -> None:
    """In a process of its own: a process can be connected to one Ray only."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.chaos.node_loss"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    print(child.stdout)
    assert child.returncode == 0 and child.stdout.endswith("done\n"), child.stdout + child.stderr[-4000:]
