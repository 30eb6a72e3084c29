"""Breaking connections of other processes, as a network or a peer would."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable

import psutil
import pytest

PIDFD_GETFD = 438  # the system call's number on every architecture


def break_unix_connections(pid: int, directory: str) -> int:
    """Shut down this process's connections to unix sockets in a directory of such a name. Returns how many."""

    def is_one(connection: socket.socket) -> bool:
        return connection.family == socket.AF_UNIX and directory in str(connection.getpeername())

    fds = [int(name) for name in os.listdir(f"/proc/{pid}/fd") if is_socket(pid, name)]
    return shut_down(pid, fds, is_one)


def break_connections_between(pid: int, other: int) -> int:
    """Shut down the TCP connections that these two processes have with each other. Returns how many."""
    ends = {(c.raddr, c.laddr) for c in psutil.Process(other).net_connections("tcp") if c.raddr}
    fds = [c.fd for c in psutil.Process(pid).net_connections("tcp") if (c.laddr, c.raddr) in ends]
    return shut_down(pid, fds, lambda connection: True)


def is_socket(pid: int, fd: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
    except OSError:
        return False


def shut_down(pid: int, fds: list[int], wanted: Callable[[socket.socket], bool]) -> int:
    """Shut down those of a process's sockets. Skips the test where the kernel does not allow it."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    process = os.pidfd_open(pid)
    broken = 0
    try:
        for fd in fds:
            copy = call(PIDFD_GETFD, process, fd, 0)
            if copy < 0:
                pytest.skip(f"cannot reach into another process's sockets: {os.strerror(ctypes.get_errno())}")
            with socket.socket(fileno=copy) as connection:
                try:
                    if wanted(connection):
                        connection.shutdown(socket.SHUT_RDWR)
                        broken += 1
                except OSError:  # not connected
                    continue
    finally:
        os.close(process)
    return broken
