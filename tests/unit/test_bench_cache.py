"""`raydix bench cache` measures what it says: the shape of its result and of its tree, not the speed."""

from __future__ import annotations

from cluster.bench import cache as bench


def test_result() -> None:
    result = bench.run_cache_bench([100, 200], repeats=3)
    assert [(row["op"], row["nodes"]) for row in result["cache"]] == [
        (op, nodes) for nodes in (100, 200) for op in ("match", "insert", "evict")
    ]
    assert all(row["median_us"] > 0 for row in result["cache"])
    assert 4 < result["bytes_per_token"] <= 20


def test_tree() -> None:
    filler = bench._Filler()
    trunk = filler.add_trunk()
    match = filler.cache.match_prefix(trunk)
    assert match.handle.cached_len == bench.SHARED_TOKENS
    assert filler.cache.size_info.total_size == bench.SHARED_TOKENS + 24 * bench.TOKENS_PER_NODE
    passed, node = 0, match.handle.node
    while node.parent is not None:
        passed, node = passed + 1, node.parent
    assert passed == 25
    filler.cache.check_integrity()
