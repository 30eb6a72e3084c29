"""Directories of sockets go with their process, or with the next one."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from cluster.ipc_directory import IpcDirectory

OWNER = "import sys\nfrom cluster.ipc_directory import IpcDirectory\nd = IpcDirectory()\nprint(d.path, flush=True)\n"


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
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
