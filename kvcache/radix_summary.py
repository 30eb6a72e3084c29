"""A bounded picture of a radix tree: its most telling nodes, found without walking all of it."""

from __future__ import annotations

import heapq
import time
from itertools import islice

from kvcache.base import NodeSummary
from kvcache.radix_node import TOKEN_BYTES, RadixNode

_LOOKED_AT = 48  # children of one node, the latest first: a root may have thousands


def summarize(root: RadixNode, max_nodes: int) -> list[NodeSummary]:
    """See `BasePrefixCache.summary`. Looks at 48 x `max_nodes` nodes at most; a node comes after its parent.

    From the nodes whose parent is shown already, the next is one in use before one that is not, then the one that
    saved most: tokens times hits.
    """
    now = time.monotonic()
    shown: list[NodeSummary] = []
    candidates: list[tuple[bool, int, int, int, RadixNode]] = []
    number = 0  # no two entries of the heap are equal up to here, so nodes are never compared

    def offer_children(node: RadixNode, index: int) -> None:
        nonlocal number
        if node.children is None:
            return
        for child in islice(reversed(node.children.values()), _LOOKED_AT):
            saved = len(child.key) // TOKEN_BYTES * (1 + child.hits)
            heapq.heappush(candidates, (child.refs == 0, -saved, number, index, child))
            number += 1

    offer_children(root, -1)
    while candidates and len(shown) < max_nodes:
        *_, parent, node = heapq.heappop(candidates)
        shown.append(
            NodeSummary(
                parent=parent,
                tokens=len(node.key) // TOKEN_BYTES,
                hits=node.hits,
                locks=node.refs,
                idle=0.0 if node.refs else now - node.idle_since,
                children=len(node.children or ()),
            )
        )
        offer_children(node, len(shown) - 1)
    return shown
