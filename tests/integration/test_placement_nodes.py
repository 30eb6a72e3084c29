"""A group over two Ray nodes (two raylets on this machine): ranks by node, tcp with CURVE, death of a node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full_grid
def test_a_group_over_two_nodes() -> None:
    """In a process of its own: a process can be connected to one Ray only."""
    root = Path(__file__).parents[2]
    child = subprocess.run(
        [sys.executable, "-m", "tests.integration.two_nodes"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert child.returncode == 0 and child.stdout.endswith("done\n"), child.stdout + child.stderr[-4000:]
