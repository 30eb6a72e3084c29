"""The best token of a shard: greedy and temperature-only sampling, before ranks compare."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.sampling.noise import gumbel, row_keys

UNUSABLE = -1
"""Stands for a token where none can be sampled: a logit is NaN or +inf, or no id is allowed."""

ShardSampler = Callable[..., tuple[torch.Tensor, torch.Tensor]]
ShardMerger = Callable[[torch.Tensor], torch.Tensor]


def create_shard_sampler(device: torch.device) -> tuple[ShardSampler, ShardMerger]:
    """`sample_shard` and `best_shard` for `device`: a Triton kernel each on CUDA, the functions below elsewhere."""
    if device.type == "cuda":
        from worker.kernels import sample  # triton comes with torch for CUDA only

        return sample.sample_shard, sample.best_shard
    return sample_shard, best_shard


def sample_shard(
    logits: torch.Tensor, vocab_start: int, rows: torch.Tensor, positions: torch.Tensor,
    scale: torch.Tensor, noise: torch.Tensor, seed_key: torch.Tensor, noisy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Best perturbed score of each entry in this shard and its token id: (float32[S], int32[S]), see `best_of`.

    Args:
        logits: float32[S, local_vocab].
        rows, positions: int64[S], table row and absolute position of each entry.
        scale, noise (0 or 1): float32, seed_key: int64, by table row (`SamplingState`).
        noisy: False when all entries are greedy: a plain arg-max.
    """
    if noisy:
        k0, k1 = row_keys(seed_key[rows], positions)
        ids = torch.arange(vocab_start, vocab_start + logits.shape[1], dtype=torch.int32, device=logits.device)
        perturbation = gumbel(k0[:, None], k1[:, None], ids).mul_(noise[rows, None])
        logits = perturbation.addcmul_(logits, scale[rows, None])
    return best_of(logits, vocab_start)


def best_of(scores: torch.Tensor, vocab_start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest score of each row and its token id, the lowest id among equals: (float32[S], int32[S]).

    A row with a NaN scores +inf, so that its shard wins. The id is `UNUSABLE` where the score is infinite.
    """
    if scores.device.type == "cpu":  # numpy is ten times as fast here
        index = torch.from_numpy(scores.numpy().argmax(1))
    else:
        index = scores.argmax(1)
    best = scores.gather(1, index[:, None])[:, 0]
    tokens = (index + vocab_start).to(torch.int32).masked_fill_(~best.isfinite(), UNUSABLE)
    return best.nan_to_num_(torch.inf, torch.inf, -torch.inf), tokens


def best_shard(shards: torch.Tensor) -> torch.Tensor:
    """The token of the best score, of the first shard among equals: int32[S].

    Args:
        shards: int32[R, 2, S], of each rank the bits of `best_of`'s scores, and its token ids.
    """
    scores = shards[:, 0].view(torch.float32)
    winner = torch.from_numpy(scores.numpy().argmax(0))  # the first among equals, which torch does not promise
    return shards[:, 1].gather(0, winner[None])[0]
