"""Counter-based Gumbel noise: a pure function of (seed, position, token id).

No generator state exists, so a request draws the same noise alone or in any batch, at any TP size, on CPU and CUDA,
and after a restart. Two hashes are involved:

1. Per row, strong and rare: `row_keys` mixes the 64-bit seed and the absolute position with the SplitMix64 finaliser
   (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014; M = mix64)::

       key = M(M(seed + G) + position * G)  mod 2^64,   G = 0x9E3779B97F4A7C15
       k0 = key mod 2^32,  k1 = key >> 32

2. Per token id, cheap: `token_bits` runs the two-multiply 32-bit permutation "lowbias32" (Wellons, hash-prospector,
   2018) over the id with the two keys folded in, and keeps the upper 31 bits::

       x = id ^ k0
       x = (x ^ x >> 16) * 0x7FEB352D
       x =  x ^ k1
       x = (x ^ x >> 15) * 0x846CA68B
       x = (x ^ x >> 16) >> 1

All of it is unsigned arithmetic modulo 2^32 or 2^64, so every implementation agrees bit for bit (torch has no
unsigned arithmetic: signed integers wrap alike, and right shifts are masked). The float part is float32::

    u = min((float(x) + 0.5) * 2^-31, 1 - 2^-24)        in (0, 1)
    gumbel = -log(-log1p(-u))

Small u makes large noise, and floats are dense near 0: the tail that decides rare tokens keeps its resolution
(the largest value is about 22.2).
"""

from __future__ import annotations

import numpy as np
import torch

GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
TOKEN_MUL_1, TOKEN_MUL_2 = 0x7FEB352D, 0x846CA68B
U_SCALE = 2.0**-31
U_MAX = 1.0 - 2.0**-24


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN, _MIX_1, _MIX_2 = (_signed(c, 64) for c in (GOLDEN, MIX_1, MIX_2))
_TOKEN_MUL_2 = _signed(TOKEN_MUL_2, 32)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def seed_keys(seed_low: torch.Tensor, seed_high: torch.Tensor) -> torch.Tensor:
    """M(seed + G) of seeds given as two int32 words: int64, kept per row so that a step mixes in the position only."""
    return _mix64(((seed_high.long() << 32) | (seed_low.long() & 0xFFFFFFFF)) + _GOLDEN)


def row_keys(seed_key: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(k0, k1) of int64[S] seed keys and absolute positions: two int32[S]."""
    key = _mix64(seed_key + positions.long() * _GOLDEN)
    low = (key & 0xFFFFFFFF).to(torch.int64)
    return _wrap32(low), _wrap32((key >> 32) & 0xFFFFFFFF)


def _wrap32(word: torch.Tensor) -> torch.Tensor:
    """int64 in 0 .. 2^32 - 1 to the int32 of the same bits (narrowing an out-of-range value is not defined)."""
    return (word - ((word & 0x80000000) << 1)).to(torch.int32)


def token_bits(k0: torch.Tensor, k1: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """31 random bits per token: int32, the broadcast shape of k0 and ids (int32 all three; k0, k1 usually [S, 1])."""
    x = ids ^ k0
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(TOKEN_MUL_1).bitwise_xor_(k1)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_TOKEN_MUL_2)
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    return (x >> 1).bitwise_and_(0x7FFFFFFF)


def gumbel(k0: torch.Tensor, k1: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise per token: float32, shapes as in `token_bits`."""
    u = token_bits(k0, k1, ids).to(torch.float32).add_(0.5).mul_(U_SCALE).clamp_(max=U_MAX)
    return u.neg_().log1p_().neg_().log_().neg_()


def reference_bits(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """`token_bits` in plain unsigned numpy arithmetic, the definition other implementations are tested against.

    `seed` is unsigned 64-bit, `ids` any integer array. Returns uint32 of the same shape.
    """
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * MIX_1) & mask
        x = ((x ^ (x >> 27)) * MIX_2) & mask
        return x ^ (x >> 31)

    key = mix((mix((seed + GOLDEN) & mask) + position * GOLDEN) & mask)
    k0, k1 = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    x = ids.astype(np.uint32) ^ k0
    x = (x ^ (x >> np.uint32(16))) * np.uint32(TOKEN_MUL_1)
    x = x ^ k1
    x = (x ^ (x >> np.uint32(15))) * np.uint32(TOKEN_MUL_2)
    return (x ^ (x >> np.uint32(16))) >> np.uint32(1)
