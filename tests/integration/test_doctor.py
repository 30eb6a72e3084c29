"""`raydix doctor` on real Ray nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full_grid
def test_a_sound_and_a_sick_cluster(tmp_path: Path) -> None:
    """In a process of its own: a process can be connected to one Ray only."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.integration.doctor_nodes", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == 0 and child.stdout.endswith("done\n"), child.stdout + child.stderr[-4000:]
