"""The score, and the index of prefixes that replicas hold."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from cluster.routing import PrefixIndex, best_first, digest_block, work_of
from kvcache.digest import DigestChange, prefix_hashes

NONE = np.empty(0, dtype=np.uint64)


def added(hashes, full: bool = False) -> DigestChange:
    return DigestChange(full, np.array(hashes, dtype=np.uint64), NONE)


def removed(hashes) -> DigestChange:
    return DigestChange(False, NONE, np.array(hashes, dtype=np.uint64))


def place(matched, outstanding, beta: float, seed: int = 0) -> int:
    return int(best_first(np.array(matched), np.array(outstanding), beta, np.random.default_rng(seed))[0])


def test_cached_tokens_less_beta_times_work() -> None:
    assert place([1000, 0], [1500, 0], beta=0.5) == 0
    assert place([1000, 0], [2500, 0], beta=0.5) == 1
    assert place([1000, 0], [10**6, 0], beta=0.0) == 0
    assert best_first(np.array([5, 9, 7]), np.zeros(3), 1.0, np.random.default_rng(0)).tolist() == [1, 2, 0]


def test_ties_are_broken_at_random() -> None:
    firsts = Counter(place([0, 0, 0, -1], [0, 0, 0, 0], 1.0, seed) for seed in range(300))
    assert set(firsts) == {0, 1, 2}
    assert min(firsts.values()) > 60


def test_work_counts_what_is_not_cached_and_a_limited_output() -> None:
    assert work_of(1000, 960, 10) == 50
    assert work_of(1000, 0, 10**6) == 1256


def test_blocks_are_whole_pages() -> None:
    assert [digest_block(size) for size in (1, 16, 48, 64, 100)] == [64, 64, 96, 64, 100]


def test_matches_by_replica() -> None:
    index = PrefixIndex(100)
    hashes = prefix_hashes(np.arange(50, dtype=np.int32), 10).tolist()
    index.learn(0, added(hashes[:2]))
    index.learn(2, added(hashes))
    index.learn(5, added(prefix_hashes(np.arange(1, 51, dtype=np.int32), 10)))
    assert index.matched(hashes, 6).tolist() == [2, 0, 5, 0, 0, 0]
    assert index.matched(hashes[:3], 3).tolist() == [2, 0, 3]
    assert index.matched(hashes, 1).tolist() == [2]
    assert index.matched([], 3).tolist() == [0, 0, 0]
    index.learn(2, removed(hashes[3:]))
    assert index.matched(hashes, 3).tolist() == [2, 0, 3]
    index.learn(0, added(hashes[:1], full=True))
    assert index.matched(hashes, 3).tolist() == [1, 0, 3]
    for replica in (0, 2, 5, 5):
        index.forget(replica)
    assert len(index) == 0 and index.matched(hashes, 6).tolist() == [0] * 6


def test_the_index_is_bounded_whatever_replicas_report() -> None:
    index = PrefixIndex(10)
    for replica in range(4):
        for round in range(5):
            index.learn(replica, added(range(1000 * replica + 100 * round, 1000 * replica + 100 * round + 50)))
    assert len(index) == 40
    index.learn(0, removed(range(50)))  # also of what it never kept
    assert len(index) == 30
    index.learn(0, added(range(7, 9)))
    assert len(index) == 32


@pytest.mark.parametrize("seed", range(3))
def test_the_index_against_sets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    index, model = PrefixIndex(10**6), {replica: set() for replica in range(5)}
    prompts = [prefix_hashes(rng.integers(3, size=40).astype(np.int32), 1).tolist() for _ in range(30)]
    for _ in range(300):
        replica, prompt = int(rng.integers(5)), prompts[rng.integers(30)]
        held = next((n for n in range(len(prompt), 0, -1) if prompt[n - 1] in model[replica]), 0)
        if rng.random() < 0.6:
            upto = int(rng.integers(len(prompt) + 1))
            index.learn(replica, added(prompt[:upto]))
            model[replica] |= set(prompt[:upto])
        elif held and not any(
            other[held - 1] == prompt[held - 1] and other[held] in model[replica] for other in prompts if held < 40
        ):  # a leaf goes first
            index.learn(replica, removed(prompt[held - 1 : held]))
            model[replica].discard(prompt[held - 1])
        elif rng.random() < 0.1:
            index.forget(replica)
            model[replica].clear()
        expected = [next((n for n in range(40, 0, -1) if prompt[n - 1] in model[r]), 0) for r in range(5)]
        assert index.matched(prompt, 5).tolist() == expected
    assert len(index) == len(set().union(*model.values()))
