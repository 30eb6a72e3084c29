"""What the doctor concludes from facts, without a cluster."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from cluster.doctor import Finding, Level, judge
from cluster.doctor.examine import pairings
from cluster.doctor.facts import Limits, ModelFiles, NodeFacts, collect, look_at_model
from cluster.doctor.findings import AllReduce

WELL = NodeFacts(
    versions={"python": "3.11.7", "ray": "2.60.0"},
    gpus=("H100", "H100"),
    driver="570.1",
    shm_total=64 << 30,
    shm_free=63 << 30,
    limits=Limits(65536, -1, -1),
    memory_total=1 << 40,
    cpus=64,
    model=ModelFiles(4, 16 << 30, None),
)


def levels(findings: list[Finding]) -> list[Level]:
    return [finding.level for finding in findings]


@pytest.mark.parametrize("count", range(1, 10))
def test_every_two_meet_once_and_nobody_twice_at_a_time(count: int) -> None:
    rounds = list(pairings(list(range(count))))
    met = sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs)
    assert met == list(combinations(range(count), 2))
    for pairs in rounds:
        seated = [seat for pair in pairs for seat in pair]
        assert len(seated) == len(set(seated))


def test_equal_versions_are_one_line_and_others_name_their_nodes() -> None:
    assert levels(list(judge.versions({"a": WELL, "b": WELL}))) == [Level.OK]
    other = replace(WELL, versions=WELL.versions | {"ray": "2.59.0"})
    (finding,) = judge.versions({"a": WELL, "b": other, "c": WELL})
    assert finding.level is Level.FAILURE
    assert finding.check == "ray version"
    assert finding.detail == "2.60.0 on a, c; 2.59.0 on b"


@pytest.mark.parametrize(
    ("ray_has", "facts", "level"),
    [
        (2, WELL, Level.OK),
        (4, WELL, Level.FAILURE),
        (1, WELL, Level.WARNING),
        (0, replace(WELL, gpus=()), Level.OK),
        (0, replace(WELL, gpus=(), errors={"gpus": "no devices"}), Level.FAILURE),
    ],
)
def test_gpus_of_ray_and_of_the_driver(ray_has: int, facts: NodeFacts, level: Level) -> None:
    assert levels(list(judge.gpus({"a": facts}, {"a": {"GPU": float(ray_has)}}))) == [level]


@pytest.mark.parametrize(
    ("shm", "gpus", "level"),
    [(64 << 20, ("H100",) * 2, Level.FAILURE), (64 << 20, (), Level.WARNING), (1 << 30, (), Level.OK)],
)
def test_shared_memory(shm: int, gpus: tuple[str, ...], level: Level) -> None:
    facts = replace(WELL, shm_total=shm, shm_free=shm, gpus=gpus)
    assert levels(list(judge.shared_memory({"a": facts}))) == [level]


@pytest.mark.parametrize(
    ("files", "level"), [(1024, Level.FAILURE), (20_000, Level.WARNING), (65_536, Level.OK), (-1, Level.OK)]
)
def test_open_files(files: int, level: Level) -> None:
    assert levels(list(judge.limits({"a": replace(WELL, limits=Limits(files, -1, -1))}))) == [level]


@pytest.mark.parametrize(
    ("ahead", "error", "level"),
    [(0.1, 0.01, Level.OK), (-2.0, 0.01, Level.WARNING), (2.0, 1.9, Level.OK), (-60.0, 1.0, Level.FAILURE)],
)
def test_clocks(ahead: float, error: float, level: Level) -> None:
    assert levels(list(judge.clocks({"a": (ahead, error)}))) == [level]


def test_a_copy_of_the_model_that_differs() -> None:
    other = replace(WELL, model=ModelFiles(4, 15 << 30, None))
    found = list(judge.model("/models/m", {"a": WELL, "b": other, "c": WELL}))
    assert levels(found) == [Level.OK, Level.FAILURE, Level.OK]
    missing = replace(WELL, model=ModelFiles(0, 0, "not there"))
    assert levels(list(judge.model("/models/m", {"a": missing}))) == [Level.FAILURE]
    assert levels(list(judge.model("owner/name", {"a": missing}))) == [Level.WARNING]


def test_pairs() -> None:
    fast, slow = AllReduce(1e-5, 40e9), AllReduce(1e-3, 1e9)
    assert judge.pair("nccl", "a", "b", fast).level is Level.OK
    assert judge.pair("nccl", "a", "b", slow).level is Level.WARNING
    assert judge.pair("gloo", "a", "b", slow).level is Level.OK
    failed = judge.pair("gloo", "a", "b", "no TCP connection")
    assert failed.level is Level.FAILURE
    assert "a and b" in failed.advice


def test_files_of_a_model(tmp_path: Path) -> None:
    assert "config.json" in look_at_model(str(tmp_path)).problem
    (tmp_path / "config.json").write_text("{}")
    assert "safetensors" in look_at_model(str(tmp_path)).problem
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "empty" in look_at_model(str(tmp_path)).problem
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    assert look_at_model(str(tmp_path)) == ModelFiles(1, 102, None)


def test_facts_of_this_machine() -> None:
    facts = collect(None)
    assert facts.cpus >= 1
    assert facts.shm_total > 0
    assert facts.versions["ray"] != "not installed"
