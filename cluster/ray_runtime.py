"""Which Ray an engine uses: the one this process is in, a running cluster, or a private one that ends with it."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass

import ray
from ray._private.services import canonicalize_bootstrap_address

from cluster.errors import ConfigError, StartupError

logger = logging.getLogger(__name__)

# Steps do not travel through Ray's object store, so a private Ray gets a small one.
PRIVATE_OBJECT_STORE_BYTES = 256 << 20
_PROBE_TIMEOUT = 3.0


@dataclass(frozen=True, slots=True)
class RayRuntime:
    """`owned`: we started this Ray or connected to it, so `close` ends the connection (and a private Ray with it).

    `may_grow`: nodes can join, so a group that does not fit yet may fit later.
    """

    owned: bool
    may_grow: bool

    def close(self) -> None:
        if self.owned and ray.is_initialized():
            ray.shutdown()


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
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=PRIVATE_OBJECT_STORE_BYTES,
        logging_level=logging.WARNING,
    )
    return RayRuntime(owned=True, may_grow=False)


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
