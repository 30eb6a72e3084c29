"""The invariants of the radix tree, checked by walking all of it."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvcache.base import CacheHandle, IntegrityError, SizeInfo
from kvcache.radix_node import TOKEN_BYTES, RadixNode, all_pages, subtree


def check_tree(root: RadixNode, page_size: int, sizes: SizeInfo, held: list[CacheHandle] | None) -> None:
    """Raise `IntegrityError` unless the tree under `root` is sound; see `BasePrefixCache.check_integrity`."""
    nodes = subtree(root)
    for node in nodes:
        _check_edge(node, root, page_size)
        _check_refs(node, root)
    _check_pages(nodes, page_size)
    _check_order(nodes, root)
    evictable = sum(len(node.key) for node in nodes if node.refs == 0) // TOKEN_BYTES
    protected = sum(len(node.key) for node in nodes if node.refs) // TOKEN_BYTES
    if sizes != (evictable, protected):
        raise IntegrityError(f"{sizes} is recorded, a walk finds {evictable} evictable and {protected} protected")
    if held is not None:
        _check_held(nodes, held)


def _check_edge(node: RadixNode, root: RadixNode, page_size: int) -> None:
    page_bytes = page_size * TOKEN_BYTES
    if node is root:
        if node.parent is not None or node.key or node.end:
            raise IntegrityError("the root has a parent or tokens")
    elif not node.key or len(node.key) % page_bytes or len(node.key) != len(node.pages) * page_size:
        raise IntegrityError(
            f"an edge of {len(node.key) / TOKEN_BYTES} tokens and {len(node.pages) / TOKEN_BYTES} pages "
            f"of {page_size} ends at {node.end}"
        )
    if node.children is None:
        return
    if not node.children:
        raise IntegrityError(f"the leaf that ends at {node.end} keeps an empty table of children")
    for first_page, child in node.children.items():
        if child.key[:page_bytes] != first_page:
            raise IntegrityError(f"a child of the node that ends at {node.end} is filed under another page")
        if child.parent is not node or child.end != node.end + len(child.key) // TOKEN_BYTES:
            raise IntegrityError(f"a child of the node that ends at {node.end} has another parent or end")


def _check_refs(node: RadixNode, root: RadixNode) -> None:
    below = sum(child.refs for child in node.children.values()) if node.children else 0
    expected = 1 if node is root else node.locks + below
    if node.locks < 0 or node.refs != expected:
        raise IntegrityError(f"the node that ends at {node.end} counts {node.refs} locks, expected {expected}")


def _check_pages(nodes: list[RadixNode], page_size: int) -> None:
    starts = all_pages(nodes)
    if (starts % page_size).any() or (starts < 0).any():
        raise IntegrityError(f"a page starts at a slot that is not a multiple of {page_size}")
    if len(np.unique(starts)) != len(starts):
        raise IntegrityError("a page is in the tree twice")


def _check_order(nodes: list[RadixNode], root: RadixNode) -> None:
    """The eviction list holds the unlocked nodes, each once, each older than its parent."""
    waiting = {node for node in nodes if node.refs == 0}
    passed: set[RadixNode] = set()
    node = root.newer
    while node is not root:
        if node not in waiting or node in passed:
            raise IntegrityError(f"the node that ends at {node.end} is in the eviction list and should not be")
        if node.newer.older is not node:
            raise IntegrityError(f"the eviction list is torn after the node that ends at {node.end}")
        if node.parent in passed:
            raise IntegrityError(f"the node that ends at {node.end} would be evicted after its parent")
        passed.add(node)
        node = node.newer
    if len(passed) != len(waiting):
        raise IntegrityError(f"{len(waiting)} nodes are unlocked, {len(passed)} are in the eviction list")


def _check_held(nodes: list[RadixNode], held: list[CacheHandle]) -> None:
    counts = Counter(handle.node for handle in held)
    for node in nodes:
        if node.locks != counts.pop(node, 0):
            raise IntegrityError(f"the node that ends at {node.end} counts {node.locks} locks, its handles disagree")
    if counts:
        raise IntegrityError(f"{len(counts)} locked handles point outside the tree")
    for handle in held:
        if handle.node.end != handle.cached_len:
            raise IntegrityError(f"a handle says {handle.cached_len} tokens, its node ends at {handle.node.end}")
