"""Which Ray an engine uses: the one this process is in, a running cluster, or a private one that ends with it."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.services import canonicalize_bootstrap_address

from cluster.deadline import within
from cluster.errors import ConfigError, StartupError
from cluster.ipc_directory import IpcDirectory

logger = logging.getLogger(__name__)

# Steps do not travel through Ray's object store, so a private Ray gets a small one.
PRIVATE_OBJECT_STORE_BYTES = 256 << 20
_PROBE_TIMEOUT = 3.0
_CLOSE_TIMEOUT = 30.0
_SOCKET_BELOW = len("session_2026-11-30_00-00-00_000000_4194304/sockets/plasma_store")
_VITAL = ("gcs_server", "raylet")  # processes without which a private Ray answers nothing, not even with an error


@dataclass(frozen=True, slots=True)
class RayRuntime:
    """`owned`: we started this Ray or connected to it, so `close` ends the connection (and a private Ray with it).

    `may_grow`: nodes can join, so a group that does not fit yet may fit later. `directory`: where a private Ray keeps
    its sockets and logs.
    """

    owned: bool
    may_grow: bool
    directory: IpcDirectory | None = None

    @property
    def lost(self) -> str | None:
        """The process of a private Ray without which it cannot go on, if it has ended."""
        if self.directory is None or not ray.is_initialized():
            return None
        dead = [kind for kind, _ in ray._private.worker._global_node.dead_processes() if kind in _VITAL]
        return f"its {dead[0]} was killed or crashed" if dead else None

    def close(self, keep_logs: bool = False) -> Path | None:
        """End what is owned. A private Ray's files go with it, unless its logs are wanted: then returns where they are.

        Safe to call twice.
        """
        if self.owned and ray.is_initialized():
            try:
                within(_CLOSE_TIMEOUT, ray.shutdown)
            except TimeoutError:
                logger.error("Ray did not end within %g s", _CLOSE_TIMEOUT)
        if self.directory is None:
            return None
        if keep_logs:
            return self.directory.keep() / "session_latest" / "logs"
        self.directory.close()
        return None


def connect(address: str, min_cpus: int, may_start: bool = True) -> RayRuntime:
    """Connect this process to Ray.

    `address` is "local" (a private Ray), "auto" (the cluster named by RAY_ADDRESS or made by `ray start`, else a
    private Ray; never the private Ray of another process), or "HOST:PORT". A private Ray offers at least `min_cpus`
    CPUs, more than the machine has if need be: a rank of a small model is welcome to share a core.

    Raises:
        ConfigError: `address` has another form.
        StartupError: no Ray answers at `address`, or there is none and `may_start` is False.
    """
    if ray.is_initialized():
        return RayRuntime(owned=False, may_grow=True)
    target = _find(address)
    if target is not None:
        # `ray start` asks for a token as soon as the machine has one; ray.init() with an address presents none.
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        try:
            ray.init(address=target, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise StartupError(f"cannot connect to Ray at {target}: {error}") from error
        return RayRuntime(owned=True, may_grow=True)
    if not may_start:
        raise StartupError("no Ray cluster runs here; name one as HOST:PORT (its head node's port, 6379 by default)")
    cpus = max(os.cpu_count() or 1, min_cpus)
    if cpus > (os.cpu_count() or 1):
        logger.info("the private Ray offers %d CPUs on %d cores", cpus, os.cpu_count())
    directory = IpcDirectory("raydix-ray-", below=_SOCKET_BELOW)
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=PRIVATE_OBJECT_STORE_BYTES,
        logging_level=logging.WARNING,
        _temp_dir=str(directory.path),
    )
    return RayRuntime(owned=True, may_grow=False, directory=directory)


def _find(address: str) -> str | None:
    """HOST:PORT to connect to, or None for a private Ray."""
    if address == "local":
        return None
    if address == "auto":
        # The look-up of `ray.init()` without an address. `address="auto"` would also take any Ray found on the machine,
        # the private one of a stranger's process included.
        target = canonicalize_bootstrap_address(None)
        if target is not None and "RAY_ADDRESS" not in os.environ and not _answers(target):
            logger.warning("the Ray cluster last started here, %s, does not answer; starting a private Ray", target)
            return None
        return target
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"ray_address must be local, auto or HOST:PORT, not {address!r}")
    if not _answers(address):
        raise StartupError(f"no Ray answers at {address}: is the head node up (`ray status --address {address}`)?")
    return address


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT):
            return True
    except OSError:
        return False
