"""All-reduce between NVLink-connected cards through memory that every rank maps: less latency than NCCL's.

One-shot: each rank reads everything of all others, for small messages. Two-shot: each rank reduces its share and reads
the others' results. Both can be captured in CUDA graphs. The multicast variants are never used.
"""

from __future__ import annotations

import logging
import os
import socket
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

MAX_BYTES = 8 << 20  # larger messages are bound by bandwidth: NCCL's
MAX_RANKS = 8
ONE_SHOT_BYTES = 1 << 20  # of all ranks' messages together
_DTYPES = (torch.bfloat16, torch.float32)  # that torch's operators of both kinds take


class SymmetricMemory:
    """A buffer that all ranks of `group` see. Products write into it, and it is reduced where it lies.

    Raises:
        RuntimeError: the cards cannot map each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> None:
        # Its own switch, read at the rendezvous.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symm_mem

        self._group_name = group.group_name
        self._one_shot_bytes = ONE_SHOT_BYTES // group.size()
        self._buffer = symm_mem.empty(MAX_BYTES // dtype.itemsize, dtype=dtype, device=device)
        symm_mem.rendezvous(self._buffer, self._group_name)

    def view(self, rows: int, columns: int) -> torch.Tensor | None:
        """[rows, columns] of the buffer, or None if it is too small. All views are the same memory."""
        count = rows * columns
        return self._buffer[:count].view(rows, columns) if count <= self._buffer.numel() else None

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is a view of the buffer."""
        return tensor.data_ptr() == self._buffer.data_ptr()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of the ranks' tensors, where `tensor` is a `view`. The result may lie in the buffer: use it before the
        next product writes there."""
        flat = tensor.view(-1)
        if flat.numel() * flat.element_size() <= self._one_shot_bytes:
            return torch.ops.symm_mem.one_shot_all_reduce(flat, "sum", self._group_name).view_as(tensor)
        torch.ops.symm_mem.two_shot_all_reduce_(flat, "sum", self._group_name)
        return tensor


def create_symmetric_memory(
    group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> SymmetricMemory | None:
    """The group's symmetric memory, or None where NCCL has to do: several hosts, too many ranks, no peer access.

    A collective: every rank calls it and gets the same answer.
    """
    reason = why_not(group, dtype, device)
    memory = None
    if reason is None:
        try:
            memory = SymmetricMemory(group, dtype, device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
        works = torch.tensor([memory is not None], dtype=torch.int32, device=device)
        dist.all_reduce(works, op=dist.ReduceOp.MIN, group=group)
        if not works.item():
            memory, reason = None, reason or "another rank could not map its peers' memory"
    logger.info("all-reduce: %s", "symmetric memory" if memory is not None else f"NCCL only ({reason})")
    return memory


def why_not(group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the ranks need not try, or None. A collective; `device`: where this rank's tensors for it lie."""
    if dtype not in _DTYPES:
        return f"torch reduces {dtype} through NCCL alone"
    if group.size() > MAX_RANKS:
        return f"{group.size()} ranks, symmetric memory takes {MAX_RANKS}"
    # The largest and the smallest; all_gather_object would unpickle what peers send.
    host = zlib.crc32(_host().encode())
    ends = torch.tensor([host, -host], dtype=torch.int64, device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = ends.tolist()
    return "the ranks are on several hosts" if largest != -smallest else None


def _host() -> str:
    """Names the machine, and on Linux this boot of it and this process's container: cloned machines and containers may
    share a host name, and ranks of two containers cannot hand each other memory."""
    boot, container = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    inside = f"{boot.read_text()}{container.stat().st_ino}" if boot.exists() and container.exists() else ""
    return socket.gethostname() + inside
