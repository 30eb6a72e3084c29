"""`ray up` for real: three hosts with ssh, our on-premise file, the real model, and a network that is cut."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.model_files import resolve_model
from tests.integration.hosts import lab, what_is_missing
from tests.integration.ray_up_files import ROOT, cluster_file, serve_file, tiny_model

MISSING = what_is_missing()


@pytest.mark.full_grid
@pytest.mark.timeout(1500)
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_three_hosts(tmp_path: Path) -> None:
    """Some ten minutes. `ray up` and `ray down` stop every Ray process they see: here, only those of the hosts."""
    model = resolve_model(None)
    with lab(tmp_path, ["head", "first", "second"]) as made:
        cluster_file(made, tmp_path / "cluster.yaml")
        serve_file(tmp_path / "two-replicas.yaml", model, tp_size=1, replicas=2)
        serve_file(tmp_path / "two-hosts.yaml", model, tp_size=3, replicas=1)
        serve_file(tmp_path / "tiny-two-hosts.yaml", tiny_model(tmp_path), tp_size=2, replicas=1, max_seq_len=128)
        scenario = ["-m", "tests.integration.ray_up_scenario", str(tmp_path), made.hosts["head"].address]
        command = made.operator.command("env", f"PYTHONPATH={ROOT}", sys.executable, *scenario)
        with (tmp_path / "scenario.log").open("wb") as log:
            child = subprocess.run(command, stdout=log, stderr=log, check=False)
        output = (tmp_path / "scenario.log").read_text()
        print(output)
        assert child.returncode == 0 and output.endswith("done\n")
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert "raydix" not in left
