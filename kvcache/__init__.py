"""Where a token's K/V lives: the physical pool, the pages in it, and the prefix caches that share them.

Everything but the pool is host-only numpy. torch is imported when a pool is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache.allocator import PageAllocator
from kvcache.base import (
    BasePrefixCache,
    CacheError,
    CacheHandle,
    InsertResult,
    IntegrityError,
    MatchResult,
    NodeSummary,
    SizeInfo,
)
from kvcache.digest import PrefixDigest
from kvcache.naive import NaivePrefixCache
from kvcache.radix import RadixPrefixCache

if TYPE_CHECKING:
    from kvcache.pool import BaseKVCachePool, KVCacheLayout, MHAKVCache

__all__ = [
    "BaseKVCachePool",
    "BasePrefixCache",
    "CacheError",
    "CacheHandle",
    "InsertResult",
    "IntegrityError",
    "KVCacheLayout",
    "MHAKVCache",
    "MatchResult",
    "NaivePrefixCache",
    "NodeSummary",
    "PageAllocator",
    "PrefixDigest",
    "RadixPrefixCache",
    "SizeInfo",
    "create_kvcache_pool",
    "create_prefix_cache",
    "prefix_cache_kinds",
]

_PREFIX_CACHES: dict[str, type[RadixPrefixCache] | type[NaivePrefixCache]] = {
    "naive": NaivePrefixCache,
    "radix": RadixPrefixCache,
}
_POOL_NAMES = ("BaseKVCachePool", "KVCacheLayout", "MHAKVCache")


def prefix_cache_kinds() -> list[str]:
    """The names that `create_prefix_cache` knows."""
    return sorted(_PREFIX_CACHES)


def create_prefix_cache(kind: str, page_size: int, digest: PrefixDigest | None = None) -> BasePrefixCache:
    """An empty prefix cache of `kind` ("radix" or "naive"); `digest`, if given, is kept up to date with its content.

    Raises `CacheError` for an unknown kind.
    """
    if kind not in _PREFIX_CACHES:
        raise CacheError(f"unknown prefix cache {kind!r}; known are {', '.join(prefix_cache_kinds())}")
    return _PREFIX_CACHES[kind](page_size, digest)


def create_kvcache_pool(*args: Any, **kwargs: Any) -> BaseKVCachePool:
    """The physical pool of one rank; arguments as in `kvcache.pool.create_kvcache_pool`. Imports torch."""
    from kvcache.pool import create_kvcache_pool

    return create_kvcache_pool(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name in _POOL_NAMES:
        import kvcache.pool

        return getattr(kvcache.pool, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
