"""`TPGroup`: the ranks that share one copy of the model, and the collectives they meet in."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from worker.symmetric_memory import SymmetricMemory, create_symmetric_memory


class TPGroup:
    """One rank's view of its tensor-parallel group. With one rank every collective is a no-op.

    Args:
        rank: this rank, 0 .. size - 1.
        size: number of ranks.
        group: the process group; None only at size 1.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not within a group of {size}")
        if size > 1 and group is None:
            raise ValueError(f"a group of {size} ranks needs a process group")
        self.rank = rank
        self.size = size
        self.group = group
        self._symmetric: SymmetricMemory | None = None

    @classmethod
    def single(cls) -> TPGroup:
        """The group of one rank."""
        return cls(0, 1, None)

    def use_symmetric_memory(self, dtype: torch.dtype, device: torch.device) -> None:
        """Reduce what is written to `reduce_buffer` through symmetric memory where the cards allow it; a collective."""
        if self.size > 1 and device.type == "cuda" and dist.get_backend(self.group) == "nccl":
            self._symmetric = create_symmetric_memory(self.group, dtype, device)

    def reduce_buffer(self, rows: int, columns: int) -> torch.Tensor | None:
        """Where to write a [rows, columns] product so that `all_reduce` is fastest; None: anywhere."""
        return None if self._symmetric is None else self._symmetric.view(rows, columns)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks: in place; of a `reduce_buffer` maybe in a new tensor, or valid until the next one."""
        if self._symmetric is not None and self._symmetric.owns(tensor):
            return self._symmetric.all_reduce(tensor)
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The ranks' tensors of equal shape, joined along `dim` in rank order."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        gathered = tensor.new_empty(self.size, *tensor.shape)
        if dist.get_backend(self.group) == "nccl":
            dist.all_gather_into_tensor(gathered, tensor, group=self.group)
        else:
            dist.all_gather(list(gathered.unbind(0)), tensor, group=self.group)
        return gathered.flatten(0, 1) if dim == 0 else torch.cat(gathered.unbind(0), dim=dim)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier(group=self.group)

    def destroy(self) -> None:
        """Leave the group; collectives fail afterwards. Safe to call twice."""
        self._symmetric = None
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None


def init_tp_group(
    rank: int,
    size: int,
    device: torch.device | str,
    init_method: str | dist.Store,
    timeout: float,
    backend: str | None = None,
) -> TPGroup:
    """Join this process to its tensor-parallel group; returns when every rank has joined.

    Args:
        device: "cpu", or the CUDA device this rank uses.
        init_method: where the ranks meet: a URL such as "tcp://HOST:PORT", or a store that is already connected.
        timeout: seconds, for joining and for each collective.
        backend: default: gloo on the CPU, NCCL on CUDA. Ranks that share a card need "gloo": NCCL refuses them.
    """
    device = torch.device(device)
    if size == 1:
        return TPGroup.single()
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    place = {"init_method": init_method} if isinstance(init_method, str) else {"store": init_method}
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        device_id=device if backend == "nccl" else None,
        **place,
    )
    return TPGroup(rank, size, dist.group.WORLD)
