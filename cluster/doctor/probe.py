"""The actor that examines its node, and measures all-reduce with another one's."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import ray

from cluster.doctor.facts import NodeFacts, collect
from cluster.doctor.findings import AllReduce
from cluster.rank_startup import use_interface_of

SMALL_BYTES = 8 << 10  # a step's hidden states of a few rows
LARGE_BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}
_SMALL_ROUNDS = 20
_LARGE_ROUNDS = 3


class Probe:
    """Made into one Ray actor per node, and per free GPU. Takes no CPU: nothing may keep it from a full node."""

    def __init__(self) -> None:
        self._ip = ray.util.get_node_ip_address()
        self._store: Any = None

    def facts(self, model: str | None) -> NodeFacts:
        return collect(model)

    def now(self) -> float:
        """This node's clock."""
        return time.time()

    def prepare(self) -> None:
        """Import what the measurements need, so that their deadlines do not pay for it."""
        import torch

        torch.set_num_threads(1)

    def open_store(self) -> tuple[str, int]:
        """Begin a measurement as rank 0; returns where the other side finds it: the address Ray knows, a free port."""
        import torch.distributed as dist

        self._store = dist.TCPStore(self._ip, 0, 2, is_master=True, wait_for_workers=False)
        return self._ip, self._store.port

    def all_reduce(self, rank: int, host: str, port: int, backend: str, timeout: float) -> AllReduce:
        """Join a group of two, the way ranks do, and measure.

        Raises:
            RuntimeError: the other side is not reached or the all-reduce fails; says which.
        """
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        from worker.parallel import init_tp_group

        use_interface_of(self._ip)
        try:
            store = self._store
            if rank == 1:
                store = dist.TCPStore(host, port, 2, is_master=False, timeout=timedelta(seconds=timeout))
        except dist.DistError as error:
            raise RuntimeError(f"no TCP connection from {self._ip} to {host}:{port}: {_first_line(error)}") from None
        device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
        group = None
        try:
            group = init_tp_group(rank, 2, device, store, timeout, backend=backend)
            return AllReduce(
                _time(group, SMALL_BYTES, device, _SMALL_ROUNDS),
                LARGE_BYTES[backend] / _time(group, LARGE_BYTES[backend], device, _LARGE_ROUNDS),
            )
        except Exception as error:
            raise RuntimeError(f"{backend} fails on {self._ip}: {_first_line(error)}") from None
        finally:
            with suppress(Exception):
                if group is not None:
                    group.destroy()
            self._store = None


def _time(group: Any, size: int, device: Any, rounds: int) -> float:
    """Seconds of one all-reduce of `size` bytes; the best of `rounds`, since others' noise only ever adds."""
    import torch

    tensor = torch.ones(size // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(rounds + 2):  # the first ones connect and allocate
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        group.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
        tensor.fill_(1.0)
    return best


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
