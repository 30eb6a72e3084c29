"""Temperature, Gumbel noise and arg-max over a shard of the vocabulary in one pass over the logits, in Triton.

The noise is `worker.sampling.noise` bit for bit in its integer part. Rows with noise factor 0 (greedy) skip it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.sampling.noise import GOLDEN, MIX_1, MIX_2, TOKEN_MUL_1, TOKEN_MUL_2, U_MAX, U_SCALE

GOLDEN_GAMMA = tl.constexpr(GOLDEN)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_MUL_1 = tl.constexpr(TOKEN_MUL_1)
_MUL_2 = tl.constexpr(TOKEN_MUL_2)
_U_SCALE = tl.constexpr(U_SCALE)
_U_MAX = tl.constexpr(U_MAX)
_UNUSABLE = tl.constexpr(-1)  # as in `worker.sampling.shard`


@triton.jit
def _better(value, index, other_value, other_index):
    """The larger value, the lower index among equals."""
    other_wins = (other_value > value) | ((other_value == value) & (other_index < index))
    return tl.where(other_wins, other_value, value), tl.where(other_wins, other_index, index)


@triton.jit
def mix64(x):
    """SplitMix64's finaliser of a uint64."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _row_keys(seed_key, position):
    """(k0, k1) uint32 of an int64 seed key and a position."""
    x = mix64(seed_key.to(tl.uint64, bitcast=True) + position.to(tl.int64).to(tl.uint64, bitcast=True) * GOLDEN_GAMMA)
    return (x & 0xFFFFFFFF).to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def _gumbel(ids, k0, k1):
    x = ids.to(tl.uint32) ^ k0
    x = (x ^ (x >> 16)) * _MUL_1
    x = x ^ k1
    x = (x ^ (x >> 15)) * _MUL_2
    x = (x ^ (x >> 16)) >> 1
    u = tl.minimum((x.to(tl.int32).to(tl.float32) + 0.5) * _U_SCALE, _U_MAX)
    # log1p(-u) with full precision for small u: log(w) * -u / (w - 1) where w = 1 - u rounded (Kahan).
    w = 1.0 - u
    log1p = tl.where(w == 1.0, -u, tl.log(w) * (-u / (w - 1.0 + (w == 1.0).to(tl.float32))))
    return -tl.log(-log1p)


@triton.jit
def _sample_kernel(
    logits_ptr, row_ptr, position_ptr, scale_ptr, noise_ptr, seed_key_ptr, value_ptr, index_ptr,
    local_vocab, vocab_start, stride,
    NOISY: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    part = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(local_vocab, PARTS), BLOCK) * BLOCK
    first = part * share
    last = tl.minimum(local_vocab, first + share)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_index = first + lane
    scale = 1.0
    noisy = False
    k0 = tl.full([], 0, tl.uint32)
    k1 = tl.full([], 0, tl.uint32)
    if NOISY:
        table_row = tl.load(row_ptr + entry)
        noisy = tl.load(noise_ptr + table_row) > 0
        scale = tl.load(scale_ptr + table_row)
        k0, k1 = _row_keys(tl.load(seed_key_ptr + table_row), tl.load(position_ptr + entry))
    row = logits_ptr + entry.to(tl.int64) * stride
    for start in range(first, last, BLOCK):
        column = start + lane
        score = tl.load(row + column, mask=column < last, other=float("-inf")).to(tl.float32)
        score = tl.where(score == score, score, float("inf"))  # a NaN wins, and is found out by it
        if NOISY:  # noqa: SIM102 (a constant of the compilation, then a value)
            if noisy:
                score = score * scale + _gumbel(vocab_start + column, k0, k1)
        wins = score > best
        best = tl.where(wins, score, best)
        best_index = tl.where(wins, column, best_index)
    value, index = tl.reduce((best, best_index), 0, _better)
    tl.store(value_ptr + entry * PARTS + part, value)
    tl.store(index_ptr + entry * PARTS + part, index)


@triton.jit
def _merge_kernel(value_ptr, index_ptr, best_ptr, token_ptr, vocab_start, PARTS: tl.constexpr):
    entry = tl.program_id(0)
    part = tl.arange(0, PARTS)
    value = tl.load(value_ptr + entry * PARTS + part)
    index = tl.load(index_ptr + entry * PARTS + part)
    value, index = tl.reduce((value, index), 0, _better)
    tl.store(best_ptr + entry, value)
    tl.store(token_ptr + entry, tl.where(tl.abs(value) == float("inf"), _UNUSABLE, vocab_start + index))


def sample_shard(
    logits: torch.Tensor, vocab_start: int, rows: torch.Tensor, positions: torch.Tensor,
    scale: torch.Tensor, noise: torch.Tensor, seed_key: torch.Tensor, noisy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Best perturbed score of each entry in this shard and its token id: (float32 [S], int32 [S]); a NaN counts as
    +inf, and the id is -1 where the score is infinite.

    Args:
        logits: [S, local_vocab].
        rows, positions: int64 [S], table row and absolute position of each entry.
        scale, noise (0 or 1): float32, seed_key: int64, by table row (`SamplingState`).
        noisy: False when all entries are greedy: a plain arg-max.
    """
    entries, local_vocab = logits.shape
    parts = 64 if entries <= 16 else 16  # few rows alone would leave most of the card idle
    values = torch.empty(entries, parts, dtype=torch.float32, device=logits.device)
    indices = torch.empty(entries, parts, dtype=torch.int32, device=logits.device)
    best = torch.empty(entries, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(entries, dtype=torch.int32, device=logits.device)
    _sample_kernel[(entries, parts)](
        logits, rows, positions, scale, noise, seed_key, values, indices, local_vocab, vocab_start,
        logits.stride(0), NOISY=noisy, PARTS=parts, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    _merge_kernel[(entries,)](values, indices, best, tokens, vocab_start, PARTS=parts, num_warps=1)
    return best, tokens


@triton.jit
def _best_shard_kernel(shard_ptr, token_ptr, entries, num_ranks, RANKS: tl.constexpr):
    entry = tl.program_id(0)
    rank = tl.arange(0, RANKS)
    exists = rank < num_ranks
    bits = tl.load(shard_ptr + 2 * rank * entries + entry, mask=exists, other=0)
    score = tl.where(exists, bits.to(tl.float32, bitcast=True), float("-inf"))
    token = tl.load(shard_ptr + (2 * rank + 1) * entries + entry, mask=exists, other=0)
    winner = tl.min(tl.where(exists & (score == tl.max(score, 0)), rank, RANKS), 0)
    tl.store(token_ptr + entry, tl.sum(tl.where(rank == winner, token, 0), 0))


def best_shard(shards: torch.Tensor) -> torch.Tensor:
    """As `worker.sampling.shard.best_shard`: int32[R, 2, S] to int32[S]."""
    ranks, _, entries = shards.shape
    tokens = torch.empty(entries, dtype=torch.int32, device=shards.device)
    _best_shard_kernel[(entries,)](shards, tokens, entries, ranks, RANKS=triton.next_power_of_2(ranks), num_warps=1)
    return tokens
