"""Which replica gets a request: what its prefix cache holds of the prompt, less the work that it has to do.

::

    score = cached tokens of the prompt - beta x outstanding tokens

A request that is not where its prefix is costs its prefill once more; one that waits behind others costs their work.
Both are tokens, so `beta` says how many tokens of prefill one token of waiting is worth: 0 is pure affinity, large
values look at the load alone. Where nothing is cached the least loaded replica wins, and ties are broken at random.
The same code routes in the server (`cluster.serve.fleet`) and in the simulator (`cluster.simulate.routers`).
"""

from __future__ import annotations

import numpy as np

from kvcache.digest import DigestChange

DEFAULT_BETA = 0.25
BLOCK_TOKENS = 64  # about so many tokens to one hash of a digest
OUTPUT_TOKENS = 256  # of an output count as work at most: how long it gets, nobody knows


def digest_block(page_size: int) -> int:
    """Tokens per hash of the digests: whole pages, BLOCK_TOKENS at least."""
    return -(-BLOCK_TOKENS // page_size) * page_size


def work_of(prompt_len: int, matched: int, max_tokens: int) -> int:
    """Tokens that a request keeps a replica busy with which holds `matched` tokens of its prompt."""
    return prompt_len - matched + min(max_tokens, OUTPUT_TOKENS)


def best_first(matched: np.ndarray, outstanding: np.ndarray, beta: float, rng: np.random.Generator) -> np.ndarray:
    """Places of replicas by falling score, int64[R]; `matched` and `outstanding` are tokens, [R]."""
    order = rng.permutation(len(matched))
    scores = matched[order] - beta * outstanding[order]
    return order[np.argsort(-scores, kind="stable")]


class PrefixIndex:
    """Which replicas hold which prefixes, from their digests: one dictionary, a bit for each replica.

    Replicas are small numbers. At most `max_hashes` are kept of each, some 150 bytes apiece, whatever it reports; more
    are left out, and the replica is underrated. A lookup costs one step for each block of the prompt that anybody has,
    whatever the number of replicas.
    """

    def __init__(self, max_hashes: int) -> None:
        self._max_hashes = max_hashes
        self._holders: dict[int, int] = {}  # prefix hash -> bit mask of replicas
        self._held: dict[int, int] = {}  # replica -> how many

    def __len__(self) -> int:
        """Distinct hashes kept."""
        return len(self._holders)

    def learn(self, replica: int, change: DigestChange) -> None:
        """What changed in a replica's digest."""
        if change.full:
            self.forget(replica)
        bit = 1 << replica
        holders, held = self._holders, self._held.get(replica, 0)
        for prefix in change.removed.tolist():
            mask = holders.get(prefix, 0)
            if mask & bit:
                held -= 1
                self._keep(prefix, mask ^ bit)
        for prefix in change.added.tolist():
            if held >= self._max_hashes:
                break
            mask = holders.get(prefix, 0)
            if not mask & bit:
                held += 1
                holders[prefix] = mask | bit
        self._held[replica] = held

    def forget(self, replica: int) -> None:
        """The replica holds nothing, or is no more."""
        if self._held.pop(replica, 0):
            bit = 1 << replica
            for prefix, mask in [item for item in self._holders.items() if item[1] & bit]:
                self._keep(prefix, mask ^ bit)

    def matched(self, hashes: list[int], replicas: int) -> np.ndarray:
        """Blocks of a prompt that each replica holds, int64[replicas]; `hashes` are the prompt's, shortest first."""
        blocks = np.zeros(replicas, dtype=np.int64)
        seen = 0
        for count in range(self._longest(hashes), 0, -1):
            new = self._holders.get(hashes[count - 1], 0) & ~seen
            seen |= new
            while new:
                lowest = new & -new
                if lowest.bit_length() <= replicas:
                    blocks[lowest.bit_length() - 1] = count
                new ^= lowest
        return blocks

    def _longest(self, hashes: list[int]) -> int:
        """Length in blocks of the longest prefix that anybody has: where one is held, its shorter ones are."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._holders:
                low = middle
            else:
                high = middle - 1
        return low

    def _keep(self, prefix: int, mask: int) -> None:
        if mask:
            self._holders[prefix] = mask
        else:
            del self._holders[prefix]
