"""Run by test_doctor: `raydix doctor` on two Ray nodes (two raylets on this machine), then with a third, sick one."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from cluster.cli import EXIT_FAILED, main
from cluster.doctor import Finding, Level, examine


def of(findings: list[Finding], check: str) -> list[Finding]:
    return [finding for finding in findings if finding.check == check]


def check_sound(model: Path) -> None:
    findings = examine(model=str(model))
    failures = [finding for finding in findings if finding.level is Level.FAILURE]
    assert failures == [], failures
    assert "2 nodes alive" in of(findings, "Ray")[0].detail
    assert len(of(findings, "versions")) == 1
    for check in ("GPUs", "shared memory", "limits", "clock", "model"):
        assert len(of(findings, check)) == 2, (check, findings)
    (pair,) = of(findings, "gloo")
    assert "GB/s" in pair.detail
    assert of(findings, "NCCL") == []
    assert all("1 weight file" in finding.detail for finding in of(findings, "model"))


def check_sick(directory: Path) -> None:
    """A node that offers a GPU it does not have, and a model that is nowhere: the command says so and fails."""
    output, file = io.StringIO(), directory / "found.json"
    with contextlib.redirect_stdout(output):
        code = main(["doctor", str(directory / "nowhere"), "--timeout", "60", "--json", str(file)])
    printed = output.getvalue()
    assert code == EXIT_FAILED, printed
    for part in ("no such directory", "all nodes mount", "Ray offers 1, the driver lists 0", "check nvidia-smi"):
        assert part in printed, printed
    found = json.loads(file.read_text())
    assert set(found[0]) == {"check", "where", "level", "detail", "advice"}
    assert sum(entry["check"] == "gloo" and entry["level"] == "ok" for entry in found) == 3, printed
    assert all(entry["advice"] for entry in found if entry["level"] != "ok")


def run(directory: Path) -> None:
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(4096))
    cluster = Cluster()
    cluster.add_node(num_cpus=1, object_store_memory=100 << 20, include_dashboard=False)
    cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    ray.init(address=cluster.address, log_to_driver=False)
    check_sound(model)
    cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=100 << 20)
    check_sick(directory)
    ray.shutdown()
    cluster.shutdown()
    (finding,) = examine("127.0.0.1:1")
    assert finding.level is Level.FAILURE
    assert "no Ray answers" in finding.detail
    print("done")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
