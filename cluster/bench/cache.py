"""What the radix tree costs: microseconds per operation over the size of the tree, and bytes per cached token.

The tree is made of trunks: a shared prompt of 7,168 tokens that a branch leaves every 288 tokens, so that a match of
all of it passes 25 nodes. A node holds about 290 tokens: 20,000 nodes are 5.8 million tokens. Page size 16.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from kvcache import RadixPrefixCache

PAGE_SIZE = 16
PROMPT_TOKENS = 8192
SHARED_TOKENS = 7168
TOKENS_PER_NODE = 288
NODES_PER_TRUNK = 2 * (SHARED_TOKENS // TOKENS_PER_NODE) + 1
MAX_TRUNKS_KEPT = 64
EVICTED_PAGES = 1000
MEMORY_NODES = 20_000
VOCAB_SIZE = 150_000


def run_cache_bench(nodes: list[int], repeats: int = 200) -> dict[str, Any]:
    """Time match, insert and evict on trees of each size in `nodes`.

    Returns ``{"cache": [{"op", "nodes", "median_us"}, ...], "bytes_per_token": float}``. One *match* finds 7,168
    cached tokens of a prompt of 8,192, *insert* then adds the other 1,024, *evict* frees 1,000 pages of old leaves.
    Bytes are the growth of a fresh process while it fills a tree of 20,000 nodes, by its resident size.
    """
    rows = []
    for count in nodes:
        rows += [{"op": op, "nodes": count, "median_us": us} for op, us in _time_operations(count, repeats).items()]
    return {"cache": rows, "bytes_per_token": measure_bytes_per_token(MEMORY_NODES)}


def measure_bytes_per_token(nodes: int) -> float:
    """Resident bytes per cached token of a tree of about `nodes` nodes, measured in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_fill_and_weigh, (nodes,))


def _fill_and_weigh(nodes: int) -> float:
    _Filler().fill(100)  # what is paid once (imports, arenas) is paid before weighing
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    filler = _Filler()
    filler.fill(nodes)
    gc.collect()
    return (process.memory_info().rss - before) / filler.cache.size_info.total_size


def _time_operations(nodes: int, repeats: int) -> dict[str, float]:
    filler = _Filler()
    trunks = filler.fill(nodes)
    cache = filler.cache
    match, insert, evict = [], [], []
    for i in range(repeats):
        trunk = trunks[i % len(trunks)]
        ids = np.concatenate([trunk, filler.tokens(PROMPT_TOKENS - SHARED_TOKENS)])
        slots = filler.slots(PROMPT_TOKENS)
        match.append(_microseconds(lambda ids=ids: cache.match_prefix(ids)))
        insert.append(_microseconds(lambda ids=ids, slots=slots: cache.insert_prefix(ids, slots)))
    size = cache.size_info.total_size
    for _ in range(repeats):
        evict.append(_microseconds(lambda: cache.evict(EVICTED_PAGES * PAGE_SIZE)))
        while cache.size_info.total_size < size:
            filler.add_trunk()
    return {"match": statistics.median(match), "insert": statistics.median(insert), "evict": statistics.median(evict)}


def _microseconds(operation: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    operation()
    return (time.perf_counter_ns() - begin) / 1000


class _Filler:
    """A tree made of trunks, and what is needed to make more of it."""

    def __init__(self, seed: int = 0) -> None:
        self.cache = RadixPrefixCache(PAGE_SIZE)
        self._rng = np.random.default_rng(seed)
        self._next_slot = 0

    def tokens(self, count: int) -> NDArray[np.int32]:
        return self._rng.integers(0, VOCAB_SIZE, count, dtype=np.int32)

    def slots(self, count: int) -> NDArray[np.int32]:
        """Slots of pages not used before."""
        self._next_slot += count
        return np.arange(self._next_slot - count, self._next_slot, dtype=np.int32)

    def add_trunk(self) -> NDArray[np.int32]:
        """Insert a shared prompt and the branches that leave it, 49 nodes; returns the prompt."""
        trunk = self.tokens(SHARED_TOKENS)
        self.cache.insert_prefix(trunk, self.slots(SHARED_TOKENS))
        for cut in range(TOKENS_PER_NODE, SHARED_TOKENS, TOKENS_PER_NODE):
            branch = np.concatenate([trunk[:cut], self.tokens(TOKENS_PER_NODE)])
            self.cache.insert_prefix(branch, self.slots(len(branch)))
        return trunk

    def fill(self, nodes: int) -> list[NDArray[np.int32]]:
        """Add about `nodes` nodes; returns some of their trunks."""
        trunks = [self.add_trunk() for _ in range(max(1, round(nodes / NODES_PER_TRUNK)))]
        return trunks[:: -(-len(trunks) // MAX_TRUNKS_KEPT)]
