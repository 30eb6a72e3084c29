"""One node of the radix tree, which is also one link of the list in which unlocked nodes wait for eviction."""

from __future__ import annotations

import time

import numpy as np

from kvcache.base import IntArray

TOKEN_BYTES = 4  # tokens and page starts are int32


class RadixNode:
    """An edge of the tree with the node at its end.

    `older` and `newer` are its neighbours in the eviction list, a ring through the root: ``root.newer`` is evicted
    first and ``root.older`` last. They are None while the node is locked.
    """

    __slots__ = ("children", "end", "hits", "idle_since", "key", "locks", "newer", "older", "pages", "parent", "refs")

    def __init__(self, key: bytes, pages: bytes, parent: RadixNode | None, end: int) -> None:
        self.key = key  # the edge's tokens, int32
        self.pages = pages  # the first slot of each of its pages, int32
        self.parent = parent  # None: the root, or no longer in the tree
        self.children: dict[bytes, RadixNode] | None = None  # by first page; None rather than empty: most are leaves
        self.end = end  # tokens from the root to the end of the edge
        self.locks = 0  # locks on handles to this node
        self.refs = 0  # locks on this node or below
        self.hits = 0  # requests that went on from here or below instead of computing it
        self.idle_since = time.monotonic()  # when it was added or last unlocked
        self.older: RadixNode | None = None
        self.newer: RadixNode | None = None

    def unlink(self) -> None:
        """Leave the eviction list."""
        older, newer = self.older, self.newer
        older.newer = newer
        newer.older = older
        self.older = self.newer = None

    def link_before(self, newer: RadixNode) -> None:
        """Enter the eviction list as the next older neighbour of `newer`; before the root is the recent end."""
        older = newer.older
        older.newer = newer.older = self
        self.older = older
        self.newer = newer

    def lock(self, above: RadixNode) -> int:
        """One more lock on this node, which those from `above` up count already. Returns the tokens it protects that
        were not."""
        self.locks += 1
        node, protected = self, 0
        while node is not above:
            refs = node.refs
            if refs == 0:
                protected += len(node.key)
                node.unlink()
            node.refs = refs + 1
            node = node.parent
        return protected // TOKEN_BYTES

    def unlock(self, root: RadixNode) -> int:
        """One lock less; nodes without any are the last to be evicted. Returns the tokens not protected any more."""
        self.locks -= 1
        now = time.monotonic()
        node, evictable = self, 0
        while node is not root:
            node.refs = refs = node.refs - 1
            if refs == 0:
                evictable += len(node.key)
                node.idle_since = now
                node.link_before(root)
            node = node.parent
        return evictable // TOKEN_BYTES


def make_root() -> RadixNode:
    """The root of an empty tree: it holds no tokens and is never evicted, so it counts as locked."""
    root = RadixNode(b"", b"", None, 0)
    root.refs = 1
    root.older = root.newer = root
    return root


def subtree(root: RadixNode) -> list[RadixNode]:
    """All nodes from `root` on, parents before their children."""
    nodes = [root]
    for node in nodes:  # grows while it is walked
        if node.children is not None:
            nodes.extend(node.children.values())
    return nodes


def all_pages(nodes: list[RadixNode]) -> IntArray:
    """First slots of all pages of `nodes`, int32."""
    return np.frombuffer(bytearray().join([node.pages for node in nodes]), np.int32)


def common_bytes(key: bytes, data: bytes, pos: int, page_size: int) -> int:
    """Bytes of whole pages on which `key` and `data[pos:]` agree; they agree on the first page at least."""
    count = min(len(key), len(data) - pos) // TOKEN_BYTES
    differs = np.frombuffer(key, np.int32, count) != np.frombuffer(data, np.int32, count, pos)
    first = int(differs.argmax())
    same = first if differs[first] else count
    return same // page_size * page_size * TOKEN_BYTES
