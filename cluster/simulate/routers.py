"""Which replica gets a request. A router sees each replica's unfinished requests, and a digest of its prefix cache as
of the last report, not the replica itself.

==============  ===========================================================  =====================================
router          serves well                                                  price
==============  ===========================================================  =====================================
random          nothing to know, nothing to go wrong                         some replicas queue while others idle
power_of_two    the less loaded of two random replicas: nearly even load     ignores what the caches hold
cache_aware     the replica that has most of the prompt, less its load       needs the digests; hot prefixes crowd
==============  ===========================================================  =====================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from cluster.errors import ConfigError
from kvcache.digest import DigestChange, prefix_hashes

DIGEST_BLOCKS = 8  # pages to one hash of the digest
REQUEST_TOKENS = 256  # cached tokens that outweigh one more unfinished request on a replica
CANDIDATES = 2  # random replicas that cache_aware looks at beside those with the prefix


class Router(ABC):
    """`loads` is the number of unfinished requests by replica."""

    needs_digests = False

    def __init__(self, replicas: int, granularity: int, rng: np.random.Generator) -> None:
        self._replicas = replicas
        self._granularity = granularity  # tokens per hash of the digests
        self._rng = rng

    @abstractmethod
    def choose(self, prompt: np.ndarray, loads: np.ndarray) -> int:
        """The replica for a prompt (int32 ids)."""

    def learn(self, replica: int, change: DigestChange) -> None:  # noqa: B027
        """A report of what changed in a replica's cache."""


class RandomRouter(Router):
    def choose(self, prompt: np.ndarray, loads: np.ndarray) -> int:
        return int(self._rng.integers(self._replicas))


class PowerOfTwo(Router):
    """Mitzenmacher, The power of two choices in randomized load balancing, 2001."""

    def choose(self, prompt: np.ndarray, loads: np.ndarray) -> int:
        first, second = self._rng.integers(self._replicas, size=2).tolist()
        return first if loads[first] <= loads[second] else second


class CacheAware(Router):
    """Largest (cached tokens - REQUEST_TOKENS x unfinished requests) among the replicas with the longest cached prefix
    and a few random ones; ties at random."""

    needs_digests = True

    def __init__(self, replicas: int, granularity: int, rng: np.random.Generator) -> None:
        super().__init__(replicas, granularity, rng)
        self._holders: dict[int, set[int]] = {}  # prefix hash -> replicas
        self._held: list[set[int]] = [set() for _ in range(replicas)]

    def learn(self, replica: int, change: DigestChange) -> None:
        held = self._held[replica]
        gone = list(held) if change.full else change.removed.tolist()
        for prefix in gone:
            held.discard(prefix)
            holders = self._holders[prefix]
            holders.discard(replica)
            if not holders:
                del self._holders[prefix]
        for prefix in change.added.tolist():
            held.add(prefix)
            self._holders.setdefault(prefix, set()).add(replica)

    def choose(self, prompt: np.ndarray, loads: np.ndarray) -> int:
        hashes = prefix_hashes(prompt[:-1], self._granularity).tolist()
        # The longest prefix that anybody has: where one is held, its shorter ones are.
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._holders:
                low = middle
            else:
                high = middle - 1
        candidates = set(self._rng.integers(self._replicas, size=CANDIDATES).tolist())
        if low:
            candidates |= self._holders[hashes[low - 1]]
        replicas = self._rng.permutation(sorted(candidates)).tolist()
        return max(replicas, key=lambda r: self._matched(r, hashes, low) - REQUEST_TOKENS * loads[r])

    def _matched(self, replica: int, hashes: list[int], longest: int) -> int:
        held = self._held[replica]
        while longest and hashes[longest - 1] not in held:
            longest -= 1
        return longest * self._granularity


ROUTERS: dict[str, type[Router]] = {"random": RandomRouter, "power_of_two": PowerOfTwo, "cache_aware": CacheAware}


def create_router(name: str, replicas: int, granularity: int, seed: int) -> Router:
    """Raises ConfigError for an unknown name."""
    if name not in ROUTERS:
        raise ConfigError(f"unknown router {name!r}; known are {', '.join(ROUTERS)}")
    return ROUTERS[name](replicas, granularity, np.random.default_rng(seed))
