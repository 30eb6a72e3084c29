"""Directories of sockets go with their process, or with the next one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cluster.ipc_directory import IpcDirectory

OWNER = "import sys\nfrom cluster.ipc_directory import IpcDirectory\nd = IpcDirectory()\nprint(d.path, flush=True)\n"


@pytest.fixture(autouse=True)
def temporary(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # pytest's own are too long for sockets
        monkeypatch.setenv("TMPDIR", place)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(place)
    tempfile.tempdir = None


def test_private_and_removed_once(temporary):
    directory = IpcDirectory()
    assert directory.path.parent == temporary and directory.path.stat().st_mode & 0o777 == 0o700
    directory.close()
    directory.close()
    assert not directory.path.exists()


def test_the_next_process_removes_what_a_killed_one_left(temporary):
    killed, alive = (
        subprocess.Popen([sys.executable, "-c", OWNER + "sys.stdin.read()"], stdin=-1, stdout=-1, text=True)
        for _ in range(2)
    )
    try:
        gone, stays = (process.stdout.readline().strip() for process in (killed, alive))
        killed.kill()
        killed.wait(10)
        (temporary / "raydix-other").mkdir()  # without a lock: not ours to judge
        mine = IpcDirectory()
        left = {str(path) for path in temporary.iterdir()}
        assert left == {stays, str(mine.path), str(temporary / "raydix-other")} and gone not in left
        mine.close()
        alive.communicate("")  # an orderly end
        assert [path.name for path in temporary.iterdir()] == ["raydix-other"]
    finally:
        for process in (killed, alive):
            process.kill()
            process.wait(10)


def test_where_the_temporary_directory_is_too_deep_for_sockets(monkeypatch):
    deep = tempfile.mkdtemp(prefix="a" * 40)
    monkeypatch.setenv("TMPDIR", deep)
    monkeypatch.setattr(tempfile, "tempdir", None)
    short, long = IpcDirectory(), IpcDirectory(below=60)
    assert (str(short.path.parent), str(long.path.parent)) == (deep, "/tmp")
    short.close()
    long.close()
    os.rmdir(deep)
