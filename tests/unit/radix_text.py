"""Small radix trees of readable text, for tests."""

from __future__ import annotations

import numpy as np

from kvcache import RadixPrefixCache


def text(string: str) -> np.ndarray:
    return np.frombuffer(string.encode(), np.uint8).astype(np.int32)


def span(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def edges(cache: RadixPrefixCache) -> list[str]:
    """The text of every edge, parents first, in the order of insertion."""
    todo, found = [cache._root], []
    while todo:
        node = todo.pop(0)
        found.append(np.frombuffer(node.key, np.int32).astype(np.uint8).tobytes().decode())
        todo += (node.children or {}).values()
    return found[1:]


def hello_cache() -> RadixPrefixCache:
    """Three greetings, inserted one after the other with slots 0-10, 100-110 and 200-222."""
    cache = RadixPrefixCache(page_size=1)
    cache.insert_prefix(text("Hello world"), span(0, 11))
    cache.insert_prefix(text("Hello there"), span(100, 11))
    cache.insert_prefix(text("Hello world how are you"), span(200, 23))
    return cache
