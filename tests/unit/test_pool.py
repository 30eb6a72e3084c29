from __future__ import annotations

import pytest
import torch

import kvcache
from kvcache import CacheError, create_kvcache_pool
from kvcache.pool import BaseKVCachePool, KVCacheLayout, MHAKVCache, local_kv_heads

LAYOUTS = list(KVCacheLayout)


def small_pool(layout: KVCacheLayout, page_size: int = 4) -> MHAKVCache:
    return MHAKVCache(3, 5, page_size, 2, 8, torch.float32, "cpu", layout)


class TestShapes:
    """The walk-through: 32 layers, 32 KV heads of 128, 1,000 pages of one slot, TP 4 (on the meta device)."""

    @pytest.mark.parametrize(
        ("layout", "strides"),
        [
            (KVCacheLayout.LAYER_FIRST, (32 * 1000 * 1024, 1000 * 1024, 1024, 1024, 128, 1)),
            (KVCacheLayout.PAGE_FIRST, (1000 * 32 * 1024, 1024, 32 * 1024, 1024, 128, 1)),
        ],
    )
    def test_buffer(self, layout: KVCacheLayout, strides: tuple[int, ...]) -> None:
        pool = create_kvcache_pool(32, 1000, 1, 32, 128, torch.float16, "meta", layout, tp_size=4, tp_rank=1)
        assert isinstance(pool, MHAKVCache)
        assert pool.kv_buffer.shape == (2, 32, 1000, 1, 8, 128)
        assert pool.kv_buffer.stride() == strides
        assert pool.k_cache(31).shape == pool.v_cache(0).shape == (1000, 1, 8, 128)
        assert (pool.num_layers, pool.dtype, pool.device) == (32, torch.float16, torch.device("meta"))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_caches_are_views(self, layout: KVCacheLayout) -> None:
        pool = small_pool(layout)
        pool.k_cache(1)[2] = 1.0
        pool.v_cache(2)[4] = 2.0
        assert pool.kv_buffer[0, 1, 2].eq(1).all()
        assert pool.kv_buffer[1, 2, 4].eq(2).all()
        assert pool.kv_buffer.count_nonzero() == 2 * 4 * 2 * 8
        assert pool.k_cache(1).untyped_storage().data_ptr() == pool.kv_buffer.untyped_storage().data_ptr()

    def test_page_first_keeps_a_page_together(self) -> None:
        pool = small_pool(KVCacheLayout.PAGE_FIRST)
        assert pool.kv_buffer[0, :, 3].is_contiguous()

    def test_layer_first_keeps_a_layer_together(self) -> None:
        pool = small_pool(KVCacheLayout.LAYER_FIRST)
        assert pool.k_cache(1).is_contiguous()
        assert pool.v_cache(1).is_contiguous()


class TestStore:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("page_size", [1, 4])
    @pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
    def test_slots(self, layout: KVCacheLayout, page_size: int, index_dtype: torch.dtype) -> None:
        pool = small_pool(layout, page_size)
        slots = torch.randperm(5 * page_size)[:3].to(index_dtype)
        k, v = torch.rand(3, 2, 8), torch.rand(3, 2, 8)
        pool.store_kv(k, v, slots, layer_id=1)
        for token, slot in enumerate(slots.tolist()):
            assert pool.k_cache(1)[slot // page_size, slot % page_size].equal(k[token])
            assert pool.v_cache(1)[slot // page_size, slot % page_size].equal(v[token])
        assert pool.kv_buffer.count_nonzero() == k.count_nonzero() + v.count_nonzero()

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_strided_input(self, layout: KVCacheLayout) -> None:
        """K and V are usually slices of one qkv tensor."""
        pool = small_pool(layout)
        qkv = torch.rand(2, 6, 8)
        pool.store_kv(qkv[:, 2:4], qkv[:, 4:6], torch.tensor([4, 5]), layer_id=0)
        assert pool.k_cache(0)[1, :2].equal(qkv[:, 2:4])
        assert pool.v_cache(0)[1, :2].equal(qkv[:, 4:6])

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_padding_shares_the_dummy_page(self, layout: KVCacheLayout) -> None:
        pool = small_pool(layout)
        rows = torch.rand(2, 2, 8)
        pool.store_kv(rows, rows, torch.tensor([16, 16]), layer_id=0)
        assert pool.kv_buffer[:, 0, :4].count_nonzero() == 0

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_offsets_past_int32(self, layout: KVCacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        """Elements beyond 2^31 of one buffer. Memory that is not touched is not real, so leave it as it comes."""
        monkeypatch.setattr(torch, "zeros", torch.empty)
        pool = MHAKVCache(2, 70_000, 16, 8, 128, torch.int8, "cpu", layout)
        assert pool.kv_buffer.numel() > 2**32
        rows = torch.arange(2 * 8 * 128).to(torch.int8).view(2, 8, 128)
        pool.store_kv(rows, rows, torch.tensor([16, 70_000 * 16 - 1], dtype=torch.int32), layer_id=1)
        for cache in (pool.k_cache(1), pool.v_cache(1)):
            assert cache[1, 0].equal(rows[0])
            assert cache[69_999, 15].equal(rows[1])


class TestHeads:
    def test_divided(self) -> None:
        assert [local_kv_heads(8, 4, rank) for rank in range(4)] == [(2, 0), (2, 2), (2, 4), (2, 6)]
        assert local_kv_heads(8, 1, 0) == (8, 0)

    def test_replicated(self) -> None:
        assert [local_kv_heads(2, 8, rank) for rank in range(8)] == [(1, head) for head in [0, 0, 0, 0, 1, 1, 1, 1]]

    @pytest.mark.parametrize(("heads", "size"), [(8, 3), (8, 12), (6, 4)])
    def test_sizes_that_would_work_are_named(self, heads: int, size: int) -> None:
        divisors = {8: "1, 2, 4, 8", 6: "1, 2, 3, 6"}[heads]
        with pytest.raises(CacheError, match=f"tp_size {size}; sizes that work: {divisors}, or a multiple of {heads}"):
            local_kv_heads(heads, size, 0)

    @pytest.mark.parametrize(("heads", "size", "rank"), [(0, 1, 0), (8, 0, 0), (8, 2, 2), (8, 2, -1)])
    def test_nonsense(self, heads: int, size: int, rank: int) -> None:
        with pytest.raises(CacheError, match="need num_kv_heads >= 1"):
            local_kv_heads(heads, size, rank)


class TestErrors:
    def test_sizes(self) -> None:
        with pytest.raises(CacheError, match="num_pages must be at least 1, got 0"):
            MHAKVCache(1, 0, 1, 1, 1, torch.float32, "cpu")

    def test_more_slots_than_int32_can_name(self) -> None:
        with pytest.raises(CacheError, match="use at most 134217727 pages"):
            MHAKVCache(1, 2**27, 16, 1, 1, torch.float32, "meta")


def test_names_are_importable_from_the_package() -> None:
    assert kvcache.MHAKVCache is MHAKVCache
    assert kvcache.BaseKVCachePool is BaseKVCachePool
    assert kvcache.KVCacheLayout is KVCacheLayout
    with pytest.raises(AttributeError, match="no attribute 'Pool'"):
        _ = kvcache.Pool
