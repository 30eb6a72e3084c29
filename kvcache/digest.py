"""A compact picture of what a radix tree holds, for a router that must not ask the tree itself.

A sequence is cut into blocks of `granularity` tokens; each cached prefix that ends on a block border is one 64-bit
hash, chained: ``h(i) = blake2b(h(i-1) || block i)``, the same in every process. A router hashes a prompt once with
`prefix_hashes` and looks the hashes up, the longest first or by bisection: where a prefix is cached, all its shorter
ones are.

The digest is a set of hashes with what changed in it since it was last read. It costs one hash per block inserted,
and nothing on a match. It is bounded: when `max_hashes` are held, further prefixes are left out, a router then
underrates this cache. A prefix is never held without its shorter ones.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.base import CacheError, IntegrityError, Ints, as_int32
from kvcache.radix_node import TOKEN_BYTES, RadixNode

_HASH_BYTES = 8
_NO_PREFIX = bytes(_HASH_BYTES)


class DigestChange(NamedTuple):
    """What to apply to a copy of the digest: forget all first if `full`; then remove, then add. uint64 hashes."""

    full: bool
    added: NDArray[np.uint64]
    removed: NDArray[np.uint64]


class DigestReading(NamedTuple):
    """What changed since the last reading, and, if it was asked for, all hashes."""

    change: DigestChange
    hashes: NDArray[np.uint64] | None

    @classmethod
    def empty(cls) -> DigestReading:
        """Of a cache that holds nothing, ever."""
        none = np.empty(0, dtype=np.uint64)
        return cls(DigestChange(False, none, none), none)


def prefix_hashes(ids: Ints, granularity: int) -> NDArray[np.uint64]:
    """The hashes of all prefixes of `ids` that end on a block border, shortest first, uint64."""
    data = as_int32(ids).tobytes()
    return _as_array(_chain(_NO_PREFIX, data, granularity * TOKEN_BYTES))


def _chain(state: bytes, data: bytes, block_bytes: int) -> list[bytes]:
    hashes = []
    for pos in range(0, len(data) - block_bytes + 1, block_bytes):
        state = blake2b(state + data[pos : pos + block_bytes], digest_size=_HASH_BYTES).digest()
        hashes.append(state)
    return hashes


def _as_array(hashes: list[bytes]) -> NDArray[np.uint64]:
    return np.frombuffer(b"".join(hashes), "<u8").astype(np.uint64) if hashes else np.empty(0, np.uint64)


class PrefixDigest:
    """The hashes of one radix tree's prefixes; the tree reports every change of its nodes."""

    def __init__(self, granularity: int = 256, max_hashes: int = 1 << 16) -> None:
        if granularity < 1 or max_hashes < 1:
            raise CacheError(f"granularity and max_hashes must be at least 1, got {granularity} and {max_hashes}")
        self.granularity = granularity
        self.max_hashes = max_hashes
        self._block_bytes = granularity * TOKEN_BYTES
        # By node, the hashes of the borders inside its edge: from the first on, without a gap. Nodes without: absent.
        self._by_node: dict[RadixNode, list[bytes]] = {}
        self._size = 0
        self._full = True
        self._changes: dict[bytes, bool] = {}  # hash -> added (True) or removed, net since the last reading

    def __len__(self) -> int:
        return self._size

    def hashes(self) -> NDArray[np.uint64]:
        """All hashes held, in no particular order."""
        return _as_array([h for hashes in self._by_node.values() for h in hashes])

    def take_changes(self) -> DigestChange:
        """What changed since the last call; the first call, and one after `clear` or many changes, tells all."""
        if self._full:
            change = DigestChange(True, self.hashes(), np.empty(0, np.uint64))
        else:
            added = [h for h, is_added in self._changes.items() if is_added]
            removed = [h for h, is_added in self._changes.items() if not is_added]
            change = DigestChange(False, _as_array(added), _as_array(removed))
        self._full = False
        self._changes = {}
        return change

    def read(self, everything: bool) -> DigestReading:
        """`take_changes`, and `hashes` of the same moment if `everything`: for readers that come later than others."""
        return DigestReading(self.take_changes(), self.hashes() if everything else None)

    def clear(self) -> None:
        """Forget everything: the tree was reset."""
        self._by_node = {}
        self._size = 0
        self._full = True
        self._changes = {}

    def node_added(self, leaf: RadixNode) -> None:
        """A leaf was put into the tree."""
        room = self.max_hashes - self._size
        begin = leaf.parent.end
        border = begin - begin % self.granularity  # the last block border at or before the leaf
        if room <= 0 or leaf.end - border < self.granularity:
            return
        state, tokens = self._before(leaf, border)
        if state is None:
            return
        count = min(room, (leaf.end - border) // self.granularity)
        hashes = _chain(state, (tokens + leaf.key)[: count * self._block_bytes], self._block_bytes)
        self._by_node[leaf] = hashes
        self._size += count
        self._record(hashes, added=True)

    def node_split(self, upper: RadixNode, lower: RadixNode) -> None:
        """`upper` was cut off the front of `lower`'s edge."""
        hashes = self._by_node.pop(lower, None)
        if hashes is None:
            return
        count = upper.end // self.granularity - upper.parent.end // self.granularity
        if hashes[:count]:
            self._by_node[upper] = hashes[:count]
        if hashes[count:]:
            self._by_node[lower] = hashes[count:]

    def node_cut(self, leaf: RadixNode) -> None:
        """`leaf` lost tokens at its end."""
        hashes = self._by_node.get(leaf)
        if hashes is None:
            return
        count = leaf.end // self.granularity - leaf.parent.end // self.granularity
        gone = hashes[count:]
        del hashes[count:]
        if not hashes:
            del self._by_node[leaf]
        self._size -= len(gone)
        self._record(gone, added=False)

    def node_removed(self, leaf: RadixNode) -> None:
        """`leaf` left the tree."""
        gone = self._by_node.pop(leaf, None)
        if gone is not None:
            self._size -= len(gone)
            self._record(gone, added=False)

    def check_integrity(self, root: RadixNode) -> None:
        """Verify the hashes against the tree under `root`; raises `IntegrityError`."""
        seen = 0
        todo = [(root, _NO_PREFIX, b"")]
        while todo:
            node, state, tokens = todo.pop()
            tokens += node.key
            expected = _chain(state, tokens, self._block_bytes)
            held = self._by_node.get(node, [])
            seen += len(held)
            if held != expected[: len(held)]:
                raise IntegrityError(f"the digest of the node that ends at {node.end} is wrong")
            if expected:
                state = expected[-1]
                tokens = tokens[len(expected) * self._block_bytes :]
            todo += [(child, state, tokens) for child in (node.children or {}).values()]
        if seen != self._size or self._size > self.max_hashes:
            raise IntegrityError(f"the digest counts {self._size} hashes of {self.max_hashes}, the tree has {seen}")

    def _before(self, leaf: RadixNode, border: int) -> tuple[bytes | None, bytes]:
        """The hash at `border` (None when it was left out) and the tokens from there to the leaf's edge."""
        pieces = []
        node = leaf.parent
        while node.parent is not None and node.parent.end >= border:
            pieces.append(node.key)
            node = node.parent
        if node.end > border:
            pieces.append(node.key[(border - node.parent.end) * TOKEN_BYTES :])
        tokens = b"".join(reversed(pieces))
        if border == 0:
            return _NO_PREFIX, tokens
        hashes = self._by_node.get(node)
        place = border // self.granularity - node.parent.end // self.granularity - 1
        return (hashes[place] if hashes is not None and place < len(hashes) else None), tokens

    def _record(self, hashes: list[bytes], added: bool) -> None:
        if self._full:
            return
        changes = self._changes
        for h in hashes:
            if changes.pop(h, added) == added:
                changes[h] = added
        if len(changes) > self.max_hashes:
            self._full = True
            self._changes = {}
