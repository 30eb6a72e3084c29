"""Ending worker processes on this machine for certain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil

_TIMEOUT = 10.0


def kill_descendants() -> None:
    """Kill every process that this one has started, and those that they have: a private Ray with all its workers."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def end_ray_workers(pids: Iterable[int], grace: float) -> None:
    """Wait `grace` seconds for these Ray workers to end, then kill the rest; returns when they are gone.

    Ray asks a process to end, which one that is stopped (SIGSTOP) does not hear.
    """
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.name().startswith("ray::"):  # a reused pid is somebody else's
                processes.append(process)
    _, alive = psutil.wait_procs(processes, timeout=grace)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_TIMEOUT)
