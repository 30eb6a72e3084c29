"""Embedding and LM head with the vocabulary split over the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from worker.layers.gemm import Gemm
from worker.layers.shard import Shard, new_parameter
from worker.parallel import TPGroup

# Rows per rank are a multiple of this, so that rows of logits stay aligned for vector loads.
ROW_ALIGNMENT = 8


class _VocabParallel(nn.Module):
    """Rows `vocab_start .. vocab_start + local_size` of a [vocab_size, hidden_size] table, padded to equal shares.

    Padding rows (ids of `vocab_size` and above) are zero; `num_valid` of the local rows are real. `weight`: a table
    to share instead of a new one.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.full_shape = (vocab_size, hidden_size)
        self.tp = tp
        self.local_size = -(-vocab_size // (tp.size * ROW_ALIGNMENT)) * ROW_ALIGNMENT
        self.vocab_start = self.local_size * tp.rank
        self.num_valid = min(max(vocab_size - self.vocab_start, 0), self.local_size)
        if weight is None:
            weight = new_parameter(self.local_size, hidden_size, dtype=dtype, device=device)
            weight[self.num_valid :].zero_()
        self.weight = weight

    def shards(self) -> Iterator[Shard]:
        rows = slice(self.vocab_start, self.vocab_start + self.num_valid)
        yield Shard(f"{self.name}.weight", self.weight.data[: self.num_valid], (rows, slice(None)), self.full_shape)

    def finalize(self) -> None:
        pass


class VocabParallelEmbedding(_VocabParallel):
    """Token ids [T] int64 -> [T, hidden_size], summed over the ranks: each contributes the ids it holds."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.vocab_start
        foreign = (local < 0) | (local >= self.local_size)
        rows = F.embedding(local.masked_fill_(foreign, 0), self.weight)
        return self.tp.all_reduce(rows.masked_fill_(foreign[:, None], 0))


class ParallelLMHead(_VocabParallel):
    """Hidden states [S, hidden_size] -> logits [S, local_size] of this rank's ids, same dtype; padding ids are -inf.

    `tied`: the embedding whose weight is shared; the checkpoint then holds no tensor for the head.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device,
        tied: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__(name, vocab_size, hidden_size, tp, dtype, device, weight=tied.weight if tied else None)
        self.tied = tied is not None
        self.gemm = Gemm(self.weight)

    def shards(self) -> Iterator[Shard]:
        return iter(()) if self.tied else super().shards()

    def finalize(self) -> None:
        if self.gemm.pack():
            self.weight = self.gemm.weight = None

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.gemm(hidden, out)
        if self.num_valid < self.local_size:
            logits[:, self.num_valid :] = float("-inf")
        return logits
