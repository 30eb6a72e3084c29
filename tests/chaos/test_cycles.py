"""Starts and stops leave no process, thread, socket, shared memory or file behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full_grid
@pytest.mark.timeout(3000)
def test_fifty_starts_and_stops_leave_nothing_behind(tiny_llama: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.chaos.cycles", str(tiny_llama), "50"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=2990,
        check=False,
    )
    print(child.stdout)
    assert child.returncode == 0 and child.stdout.endswith("done\n"), child.stdout + child.stderr[-4000:]
