"""`IpcDirectory`: a private directory for ipc sockets, or a private Ray, that does not outlive its process for long.

A process that is killed leaves its directory behind. Each holds a lock, which the kernel drops with the process: the
next one on this machine to make a directory removes those whose lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

IPC_PREFIX = "raydix-"
_LOCK = "lock"
_SHORT = "/tmp"
_LONGEST_SOCKET = 107  # bytes of a unix socket's path
_RANDOM = 8  # characters that mkdtemp adds


class IpcDirectory:
    """A directory that only this user may enter; `close` removes it, and so does an orderly end of the process.

    It lies in the temporary directory, or in /tmp where that one's name is too long for sockets: `below` is the length
    of their longest path below the new directory.
    """

    def __init__(self, prefix: str = IPC_PREFIX, below: int = 20) -> None:
        remove_abandoned()
        fits = len(tempfile.gettempdir()) + len(prefix) + _RANDOM + 2 + below <= _LONGEST_SOCKET
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=None if fits else _SHORT))
        # the name appears with the lock held, so that nobody takes a new directory for an abandoned one
        lock = os.open(self.path / f"{_LOCK}.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        (self.path / f"{_LOCK}.new").rename(self.path / _LOCK)
        self._remove = weakref.finalize(self, _remove, self.path, lock)

    def close(self) -> None:
        """Safe to call twice."""
        self._remove()

    def keep(self) -> Path:
        """Let the directory outlive this process; returns it."""
        self._remove.detach()
        (self.path / _LOCK).unlink(missing_ok=True)
        return self.path


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def remove_abandoned() -> None:
    """Remove this user's directories whose processes are gone."""
    for directory in [path for place in {tempfile.gettempdir(), _SHORT} for path in Path(place).glob(f"{IPC_PREFIX}*")]:
        with contextlib.suppress(OSError):  # another user's, or no such directory any more
            if directory.is_dir() and not directory.is_symlink() and directory.stat().st_uid == os.getuid():
                _remove_if_abandoned(directory)


def _remove_if_abandoned(directory: Path) -> None:
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)
