"""What a node says of itself. Runs on every node, in the environment in which ranks will run."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VERSIONED = ("raydix", "ray", "torch", "transformers", "pyzmq")
_DRIVER_TIMEOUT = 20.0  # seconds; the first call of nvidia-smi wakes the cards up


@dataclass(frozen=True, slots=True)
class Limits:
    """Soft limits of this process; -1 means unlimited. `memlock` is bytes."""

    nofile: int
    nproc: int
    memlock: int


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model as this node sees it. `problem` is None if all of it is readable; `bytes` is the weights' size."""

    files: int
    bytes: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node. `gpus` are the cards' names as the driver lists them; sizes are bytes."""

    versions: dict[str, str]
    gpus: tuple[str, ...]
    driver: str
    shm_total: int
    shm_free: int
    limits: Limits
    memory_total: int
    cpus: int
    model: ModelFiles | None = None
    errors: dict[str, str] = field(default_factory=dict)


def collect(model: str | None) -> NodeFacts:
    """The facts of this node. `model`: a directory or hub id that must be readable here; None: not looked at."""
    import psutil

    errors: dict[str, str] = {}
    gpus, driver = _gpus(errors)
    shm_total, shm_free = _shared_memory(errors)
    return NodeFacts(
        versions=_versions(),
        gpus=gpus,
        driver=driver,
        shm_total=shm_total,
        shm_free=shm_free,
        limits=Limits(
            *(resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)),
            resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        ),
        memory_total=psutil.virtual_memory().total,
        cpus=os.cpu_count() or 1,
        model=look_at_model(model) if model else None,
        errors=errors,
    )


def look_at_model(model: str) -> ModelFiles:
    """Reads a little of each file of a checkpoint. A hub id is looked up in this node's hub cache only."""
    path = Path(model).expanduser()
    if not path.is_dir():
        cached = _in_hub_cache(model)
        if cached is None:
            return ModelFiles(0, 0, "no such directory, and not in the hub's cache of this node")
        path = cached
    weights = sorted(path.glob("*.safetensors"))
    if not (path / "config.json").is_file():
        return ModelFiles(0, 0, f"{path} has no config.json")
    if not weights:
        return ModelFiles(0, 0, f"{path} has no *.safetensors")
    total = 0
    for file in [path / "config.json", *weights]:
        try:
            with file.open("rb") as stream:
                if not stream.read(8):
                    return ModelFiles(len(weights), total, f"{file} is empty")
            total += file.stat().st_size
        except OSError as error:
            return ModelFiles(len(weights), total, f"{file} cannot be read: {error.strerror}")
    return ModelFiles(len(weights), total, None)


def _in_hub_cache(model: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except Exception:  # the hub client has many ways to say that it is not there, or no hub id
        return None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _gpus(errors: dict[str, str]) -> tuple[tuple[str, ...], str]:
    """Names of the cards and the driver's version, from nvidia-smi; nothing where there is no driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT, check=False)
    except FileNotFoundError:
        return (), ""
    except subprocess.TimeoutExpired:
        errors["gpus"] = f"nvidia-smi did not answer within {_DRIVER_TIMEOUT:g} s"
        return (), ""
    if done.returncode != 0:
        errors["gpus"] = (done.stdout + done.stderr).strip().splitlines()[0] if done.stdout + done.stderr else "failed"
        return (), ""
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
    return tuple(name.strip() for name, _ in rows), rows[0][1].strip() if rows else ""


def _shared_memory(errors: dict[str, str]) -> tuple[int, int]:
    try:
        place = os.statvfs("/dev/shm")
    except OSError as error:
        errors["shared memory"] = f"/dev/shm: {error.strerror}"
        return 0, 0
    return place.f_blocks * place.f_frsize, place.f_bavail * place.f_frsize
