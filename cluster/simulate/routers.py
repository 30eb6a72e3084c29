"""Which replica gets a request. A router sees each replica's unfinished requests, and a digest of its prefix cache as
of the last report, not the replica itself.

==============  ===========================================================  =====================================
router          serves well                                                  price
==============  ===========================================================  =====================================
random          nothing to know, nothing to go wrong                         some replicas queue while others idle
power_of_two    the less loaded of two random replicas: nearly even load     ignores what the caches hold
affinity        the replica that has most of the prompt                      hot prefixes crowd one replica
cache_aware     the same, less the work that the replica has                 needs the digests
==============  ===========================================================  =====================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from cluster.errors import ConfigError
from cluster.routing import PrefixIndex, best_first, work_of
from kvcache.digest import DigestChange, prefix_hashes

MAX_HASHES = 1 << 16  # kept of each replica


class Router(ABC):
    """Counts each replica's unfinished requests."""

    needs_digests = False

    def __init__(self, replicas: int, granularity: int, beta: float, rng: np.random.Generator) -> None:
        self._replicas = replicas
        self._granularity = granularity  # tokens per hash of the digests
        self._beta = beta
        self._rng = rng
        self._unfinished = np.zeros(replicas, dtype=np.int64)
        self._replica_of: dict[int, int] = {}

    def route(self, number: int, prompt: np.ndarray, prompt_len: int, max_tokens: int) -> int:
        """The replica for request `number`; `prompt` (int32 ids) is empty unless the router needs digests."""
        replica = self._choose(number, prompt, prompt_len, max_tokens)
        self._unfinished[replica] += 1
        self._replica_of[number] = replica
        return replica

    def ended(self, number: int) -> None:
        """A request that was routed has ended, or was refused."""
        self._unfinished[self._replica_of.pop(number)] -= 1

    @abstractmethod
    def _choose(self, number: int, prompt: np.ndarray, prompt_len: int, max_tokens: int) -> int: ...

    def learn(self, replica: int, change: DigestChange) -> None:  # noqa: B027
        """A report of what changed in a replica's cache."""


class RandomRouter(Router):
    def _choose(self, number: int, prompt: np.ndarray, prompt_len: int, max_tokens: int) -> int:
        return int(self._rng.integers(self._replicas))


class PowerOfTwo(Router):
    """Mitzenmacher, The power of two choices in randomized load balancing, 2001."""

    def _choose(self, number: int, prompt: np.ndarray, prompt_len: int, max_tokens: int) -> int:
        first, second = self._rng.integers(self._replicas, size=2).tolist()
        return first if self._unfinished[first] <= self._unfinished[second] else second


class CacheAware(Router):
    """The server's own score, see `cluster.routing`."""

    needs_digests = True

    def __init__(self, replicas: int, granularity: int, beta: float, rng: np.random.Generator) -> None:
        super().__init__(replicas, granularity, beta, rng)
        self._index = PrefixIndex(MAX_HASHES)
        self._outstanding = np.zeros(replicas, dtype=np.int64)
        self._work: dict[int, int] = {}

    def learn(self, replica: int, change: DigestChange) -> None:
        self._index.learn(replica, change)

    def ended(self, number: int) -> None:
        self._outstanding[self._replica_of[number]] -= self._work.pop(number)
        super().ended(number)

    def _choose(self, number: int, prompt: np.ndarray, prompt_len: int, max_tokens: int) -> int:
        hashes = prefix_hashes(prompt[:-1], self._granularity).tolist()
        matched = self._granularity * self._index.matched(hashes, self._replicas)
        replica = int(best_first(matched, self._outstanding, self._beta, self._rng)[0])
        self._work[number] = work_of(prompt_len, int(matched[replica]), max_tokens)
        self._outstanding[replica] += self._work[number]
        return replica


class Affinity(CacheAware):
    """The longest cached prefix, whatever the load."""

    def __init__(self, replicas: int, granularity: int, beta: float, rng: np.random.Generator) -> None:
        super().__init__(replicas, granularity, 0.0, rng)


ROUTERS: dict[str, type[Router]] = {
    "random": RandomRouter,
    "power_of_two": PowerOfTwo,
    "affinity": Affinity,
    "cache_aware": CacheAware,
}


def create_router(name: str, replicas: int, granularity: int, beta: float, seed: int) -> Router:
    """Raises ConfigError for an unknown name."""
    if name not in ROUTERS:
        raise ConfigError(f"unknown router {name!r}; known are {', '.join(ROUTERS)}")
    return ROUTERS[name](replicas, granularity, beta, np.random.default_rng(seed))
