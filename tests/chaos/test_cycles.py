"""Starts and stops leave no process, thread, socket, shared memory or file behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


@pytest.mark.full_grid
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("what", "cycles"), [("engines", 50), ("rays", 8)])
def test_starts_and_stops_leave_nothing_behind(tiny_llama: Path, what: str, cycles: int) -> None:
    """Within one Ray nothing at all; with a Ray each, no more than plain `ray.init(); ray.shutdown()` leave."""
    with tempfile.TemporaryDirectory(prefix="cycles-", dir="/tmp") as temporary:  # short: sockets lie in it
        child = subprocess.run(
            [sys.executable, "-m", "tests.chaos.cycles", what, str(tiny_llama), str(cycles)],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"TMPDIR": temporary},
            capture_output=True,
            text=True,
            timeout=2990,
            check=False,
        )
    print(child.stdout)
    assert child.returncode == 0 and child.stdout.endswith("done\n"), child.stdout + child.stderr[-4000:]
