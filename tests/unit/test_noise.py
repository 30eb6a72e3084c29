"""The counter-based noise: its integer part bit for bit, its distribution, its independence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worker.sampling.noise import gumbel, reference_bits, row_keys, seed_keys, token_bits

SEEDS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1]
POSITIONS = [0, 1, 77, 2**20, 2**31 - 1]
PINNED = [1769772681, 1529185710, 132688287]


def keys(seeds: list[int], positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int32).reshape(-1, 2).copy())
    k0, k1 = row_keys(seed_keys(words[:, 0], words[:, 1]), torch.tensor(positions))
    return k0[:, None], k1[:, None]


def test_bits_equal_the_unsigned_reference() -> None:
    ids = np.arange(0, 300_000, 7, dtype=np.int32)
    grid = [(seed, position) for seed in SEEDS for position in POSITIONS]
    bits = token_bits(*keys(*map(list, zip(*grid, strict=True))), torch.from_numpy(ids))
    for row, (seed, position) in zip(bits.numpy(), grid, strict=True):
        np.testing.assert_array_equal(row.astype(np.uint32), reference_bits(seed, position, ids))


def test_bits_are_pinned() -> None:
    """A change of the hash changes every sampled stream: it must be deliberate."""
    assert reference_bits(42, 1000, np.array([0, 1, 151_000])).tolist() == PINNED


def test_noise_depends_on_seed_position_and_id_alone() -> None:
    ids = torch.arange(1000, dtype=torch.int32)
    whole = gumbel(*keys([3, 4, 5], [10, 20, 30]), ids)
    alone = gumbel(*keys([4], [20]), ids[600:700])
    assert torch.equal(whole[1:2, 600:700], alone)


@pytest.mark.parametrize("vary", ["id", "position", "seed"])
def test_gumbel_distribution(vary: str) -> None:
    """Kolmogorov-Smirnov against exp(-exp(-x)), along each of the three counters."""
    n = 100_000
    if vary == "id":
        noise = gumbel(*keys([9], [9]), torch.arange(n, dtype=torch.int32))
    else:
        counters = list(range(n))
        same = [5] * n
        pair = keys(counters, same) if vary == "seed" else keys(same, counters)
        noise = gumbel(*pair, torch.tensor([17], dtype=torch.int32))
    x = np.sort(noise.numpy().ravel().astype(np.float64))
    cdf = np.exp(-np.exp(-x))
    grid = np.arange(n) / n
    assert max(np.abs(cdf - grid).max(), np.abs(cdf - grid - 1 / n).max()) < 1.95 / np.sqrt(n)  # p = 0.001
    assert np.isfinite(x).all()


def test_neighbouring_counters_do_not_correlate() -> None:
    ids = torch.arange(20_000, dtype=torch.int32)
    base, seed, position = gumbel(*keys([8, 9, 8], [5, 5, 6]), ids).numpy()
    pairs = [(base, seed), (base, position), (base[:-1], base[1:]), (base[:-64], base[64:])]
    for a, b in pairs:
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(len(a))


def test_extreme_bits_stay_finite() -> None:
    """u is kept off 0 and 1, so no noise is infinite, whatever the hash gives."""
    for bits in (0, 1, 2**31 - 1):
        u = np.minimum((np.float32(bits) + np.float32(0.5)) * np.float32(2**-31), np.float32(1 - 2**-24))
        assert np.isfinite(-np.log(-np.log1p(-u)))
