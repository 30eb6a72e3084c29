"""The radix tree: a compressed prefix tree over pages of tokens, with exact least-recently-used eviction.

::

    root --"system prompt"--> A --" user one"--> B        an edge holds whole pages, at least one
                              A --" user two"--> C        siblings differ in their first page: it is the child key

A node keeps its edge as raw bytes: the tokens as int32, and each page's first slot as int32 (slots inside a page
follow each other). At page size 16 that is 4.25 bytes a token plus some 400 bytes a node; nothing is a view, so no
caller's array stays alive. A whole edge is compared by one memcmp; only the edge where the sequences part is
compared with numpy, to find the page.

Eviction order. All unlocked nodes, inner ones too, form one list from least to most recently used, with a rule that
makes eviction O(freed): **a node is older in the list than its parent.** Using a prefix uses its ancestors, so the
rule is only a matter of breaking ties, and it makes the oldest node a leaf, always. Locked nodes are not in the list:
a lock counts on every node up to the root, so everything below an unlocked node is unlocked.

Splits. A node that is split keeps its object as the *lower* part and gets a new upper one, so handles to it, whose
prefix ends where the lower part ends, stay right; the upper part inherits the lock count.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvcache.base import (
    BasePrefixCache,
    CacheError,
    CacheHandle,
    InsertResult,
    IntArray,
    Ints,
    MatchResult,
    NodeSummary,
    SizeInfo,
    as_int32,
    first_slots,
    page_slots,
    slot_offsets,
)
from kvcache.digest import PrefixDigest
from kvcache.radix_check import check_tree
from kvcache.radix_node import TOKEN_BYTES, RadixNode, all_pages, common_bytes, make_root, subtree
from kvcache.radix_summary import summarize


class RadixPrefixCache(BasePrefixCache):
    """Prefix cache as a radix tree of pages. With a `digest`, keeps it up to date for a router."""

    def __init__(self, page_size: int, digest: PrefixDigest | None = None) -> None:
        if page_size < 1:
            raise CacheError(f"page_size must be at least 1, got {page_size}")
        if digest is not None and digest.granularity % page_size:
            raise CacheError(
                f"the digest's granularity of {digest.granularity} tokens must be a multiple of page_size {page_size}"
            )
        self.page_size = page_size
        self.digest = digest
        self._page_bytes = page_size * TOKEN_BYTES
        self._offsets = slot_offsets(1, page_size)  # grows with the longest match
        self._root = make_root()
        self._evictable = 0
        self._protected = 0

    def match_prefix(self, ids: Ints, start: CacheHandle | None = None) -> MatchResult:
        ids = as_int32(ids)
        if start is not None and start.node.children is None:
            ids = ids[: start.cached_len]  # nothing is cached beyond it: spare the copy
        node, data = self._begin(ids, start)
        parts: list[bytes] = []
        node, _ = self._walk(node, data, parts)
        return MatchResult(CacheHandle(node.end, node), self._token_slots(parts))

    def insert_prefix(self, ids: Ints, indices: Ints, start: CacheHandle | None = None) -> InsertResult:
        ids = as_int32(ids)
        slots = as_int32(indices)
        first = 0 if start is None else start.cached_len
        if len(slots) != len(ids) - first:
            raise CacheError(f"{len(ids) - first} token ids from position {first} on, but {len(slots)} slots for them")
        full = len(slots) - len(slots) % self.page_size
        return self.insert_pages(ids[: first + full], first_slots(slots[:full], self.page_size), start)

    def insert_pages(self, ids: Ints, page_starts: Ints, start: CacheHandle | None = None) -> InsertResult:
        ids = as_int32(ids)
        node, data = self._begin(ids, start)
        if len(page_starts) * self._page_bytes != len(data):
            raise CacheError(
                f"{len(data) // TOKEN_BYTES} token ids from position {node.end} on do not fill the {len(page_starts)} "
                f"pages of {self.page_size} given for them"
            )
        node, pos = self._walk(node, data, [])
        cached_len = node.end
        if pos < len(data):
            pages = as_int32(page_starts)[pos // self._page_bytes :].tobytes()
            node = self._add_leaf(node, data[pos:] if pos else data, pages)
        return InsertResult(cached_len, CacheHandle(node.end, node))

    def peek(self, ids: Ints) -> int:
        """Length of the longest cached prefix of `ids`; unlike `match_prefix` it leaves no trace in the tree."""
        node, data = self._begin(as_int32(ids), None)
        pos = 0
        while node.children is not None:
            child = node.children.get(data[pos : pos + self._page_bytes])
            if child is None:
                break
            if not data.startswith(child.key, pos):
                pos += common_bytes(child.key, data, pos, self.page_size)
                break
            pos += len(child.key)
            node = child
        return pos // TOKEN_BYTES

    def lock_handle(self, handle: CacheHandle, unlock: bool = False) -> None:
        if unlock:
            self._protect(-self._locked_node(handle).unlock(self._root))
        else:
            self._protect(self._live_node(handle).lock(self._root))

    def move_lock(self, held: CacheHandle, longer: CacheHandle) -> None:
        node, end = self._locked_node(held), self._live_node(longer)
        node.locks -= 1
        self._protect(end.lock(above=node))

    def count_hit(self, handle: CacheHandle, start: CacheHandle | None = None) -> None:
        node = handle.node
        known = self._root if start is None else start.node
        while node is not known and node is not self._root:
            node.hits += 1
            node = node.parent

    def summary(self, max_nodes: int) -> list[NodeSummary]:
        return summarize(self._root, max_nodes)

    def evict(self, num_tokens: int, partial: bool = True) -> IntArray:
        wanted = -(-num_tokens // self.page_size)
        if wanted * self.page_size > self._evictable:
            raise CacheError(
                f"cannot evict {num_tokens} tokens: {self._evictable} are evictable and {self._protected} protected"
            )
        root = self._root
        parts: list[bytes] = []
        freed = 0  # in bytes of page starts, as `wanted` is from here on
        wanted *= TOKEN_BYTES
        while freed < wanted:
            leaf = root.newer
            pages = leaf.pages
            if partial and len(pages) > wanted - freed:
                parts.append(self._cut_leaf(leaf, (wanted - freed) // TOKEN_BYTES))
                freed = wanted
                break
            parts.append(pages)
            freed += len(pages)
            self._remove_leaf(leaf)
        self._evictable -= freed // TOKEN_BYTES * self.page_size
        return self._token_slots(parts)

    def forget(self, handle: CacheHandle) -> IntArray:
        node, parts = self._live_node(handle), []
        while node is not self._root and node.children is None and node.refs == 0:
            parent = node.parent
            parts.append(node.pages)
            self._evictable -= len(node.key) // TOKEN_BYTES
            self._remove_leaf(node)
            node = parent
        return self._token_slots(parts)

    @property
    def size_info(self) -> SizeInfo:
        return SizeInfo(self._evictable, self._protected)

    def page_starts(self) -> IntArray:
        return all_pages(subtree(self._root))

    def reset(self) -> None:
        # Parents and children refer to each other: take the tree apart, so that it is freed now rather than by a
        # garbage collection, and so that every handle to it is seen to be stale.
        for node in subtree(self._root):
            node.parent = node.children = node.older = node.newer = None
        self._root = make_root()
        self._evictable = self._protected = 0
        if self.digest is not None:
            self.digest.clear()

    def check_integrity(self, held: Iterable[CacheHandle] | None = None) -> None:
        check_tree(self._root, self.page_size, self.size_info, None if held is None else list(held))
        if self.digest is not None:
            self.digest.check_integrity(self._root)

    def _live_node(self, handle: CacheHandle) -> RadixNode:
        node = handle.node
        if node is self._root or (node.parent is not None and node.end >= handle.cached_len):
            return node
        raise CacheError(f"the handle to a prefix of {handle.cached_len} tokens is stale: the prefix was evicted")

    def _locked_node(self, handle: CacheHandle) -> RadixNode:
        node = self._live_node(handle)
        if node.locks == 0:
            raise CacheError(f"the prefix of {handle.cached_len} tokens is not locked")
        return node

    def _protect(self, tokens: int) -> None:
        self._evictable -= tokens
        self._protected += tokens

    def _begin(self, ids: IntArray, start: CacheHandle | None) -> tuple[RadixNode, bytes]:
        """The node to walk from and the tokens after it, as bytes."""
        if start is None:
            return self._root, ids.tobytes()
        node = self._live_node(start)
        if len(ids) < start.cached_len:
            raise CacheError(f"{len(ids)} token ids cannot go on from a prefix of {start.cached_len}; pass all of them")
        return node, ids[start.cached_len :].tobytes()

    def _walk(self, node: RadixNode, data: bytes, parts: list[bytes]) -> tuple[RadixNode, int]:
        """Follow `data` down from `node`, splitting the edge where they part, marking what is passed as just used.

        Appends the page starts of each edge to `parts`; returns the last node and the bytes consumed.
        """
        page_bytes = self._page_bytes
        # Each unlocked node goes right before its parent in the list, or, below the locked ones, to the recent end.
        behind = self._root
        if node.refs == 0:
            self._touch_ancestors(node)
            behind = node
        pos = 0
        while node.children is not None:
            child = node.children.get(data[pos : pos + page_bytes])
            if child is None:
                break
            if not data.startswith(child.key, pos):
                child = self._split(child, common_bytes(child.key, data, pos, self.page_size))
            pos += len(child.key)
            if child.refs == 0:
                if behind.older is not child:
                    child.unlink()
                    child.link_before(behind)
                behind = child
            parts.append(child.pages)
            node = child
        return node, pos

    def _touch_ancestors(self, node: RadixNode) -> None:
        while node.refs == 0:
            node.unlink()
            node.link_before(self._root)
            node = node.parent

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Cut `node`'s edge after `at` bytes; the new upper node is returned, `node` is the lower one."""
        page_bytes = self._page_bytes
        key, pages, parent = node.key, node.pages, node.parent
        cut = at // self.page_size  # TOKEN_BYTES a page
        upper = RadixNode(key[:at], pages[:cut], parent, parent.end + at // TOKEN_BYTES)
        parent.children[key[:page_bytes]] = upper
        upper.children = {key[at : at + page_bytes]: node}
        upper.refs, upper.hits, upper.idle_since = node.refs, node.hits, node.idle_since
        node.key = key[at:]
        node.pages = pages[cut:]
        node.parent = upper
        if node.refs == 0:
            upper.link_before(node.newer)
        if self.digest is not None:
            self.digest.node_split(upper, node)
        return upper

    def _add_leaf(self, parent: RadixNode, key: bytes, pages: bytes) -> RadixNode:
        tokens = len(key) // TOKEN_BYTES
        leaf = RadixNode(key, pages, parent, parent.end + tokens)
        if parent.children is None:
            parent.children = {}
        parent.children[key[: self._page_bytes]] = leaf
        leaf.link_before(self._root if parent.refs else parent)
        self._evictable += tokens
        if self.digest is not None:
            self.digest.node_added(leaf)
        return leaf

    def _remove_leaf(self, leaf: RadixNode) -> None:
        leaf.unlink()
        parent = leaf.parent
        if len(parent.children) == 1:
            parent.children = None
        else:
            del parent.children[leaf.key[: self._page_bytes]]
        leaf.parent = None
        if self.digest is not None:
            self.digest.node_removed(leaf)

    def _cut_leaf(self, leaf: RadixNode, pages: int) -> bytes:
        """Take `pages` pages off the end of `leaf`; returns their page starts."""
        taken = leaf.pages[-pages * TOKEN_BYTES :]
        leaf.pages = leaf.pages[: -pages * TOKEN_BYTES]
        leaf.key = leaf.key[: -pages * self._page_bytes]
        leaf.end -= pages * self.page_size
        if self.digest is not None:
            self.digest.node_cut(leaf)
        return taken

    def _token_slots(self, parts: list[bytes]) -> IntArray:
        if not parts:
            return np.empty(0, np.int32)
        starts = np.frombuffer(bytearray().join(parts), np.int32)
        if len(self._offsets) < len(starts) * self.page_size:
            self._offsets = slot_offsets(2 * len(starts), self.page_size)
        return page_slots(starts, self.page_size, self._offsets)
