"""The radix tree against a brute-force model: a table from every cached page-aligned prefix to its page and last use.

The model knows nothing of nodes, edges or lists. What it fixes: which prefixes are cached and in which slots, what is
evictable, that only ends of prefixes are evicted and no page before one that was used longer ago, which handles are
stale, and the digest.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from kvcache import CacheError, CacheHandle, PrefixDigest, RadixPrefixCache
from kvcache.base import page_slots
from kvcache.digest import prefix_hashes

Prefix = tuple[int, ...]

# Few distinct pages, so that sequences share, part and meet again; a tail that fills no page now and then.
page_names = st.lists(st.integers(0, 2), max_size=7)


class Held:
    """A handle the machine keeps, with what the model knows about it."""

    def __init__(self, handle: CacheHandle, prefix: Prefix) -> None:
        self.handle = handle
        self.prefix = prefix
        self.locks = 0
        self.evicted = False


class RadixMachine(RuleBasedStateMachine):
    handles = Bundle("handles")

    @initialize(page_size=st.sampled_from([1, 2, 3]), blocks=st.sampled_from([1, 2]), bound=st.sampled_from([3, 10**6]))
    def start(self, page_size: int, blocks: int, bound: int) -> None:
        self.page_size = page_size
        self.digest = PrefixDigest(granularity=blocks * page_size, max_hashes=bound)
        self.cache = RadixPrefixCache(page_size, self.digest)
        self.pages: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.known: list[Held] = []
        self.router: set[int] = set()
        self.clock = 0
        self.next_page = 0

    # -- the model -----------------------------------------------------------------------------------------------

    def ids(self, names: list[int], tail: int = 0) -> np.ndarray:
        """Tokens of the named pages; pages differ in their last token only, and a tail fills no page."""
        tokens = [token for name in names for token in [7] * (self.page_size - 1) + [name]]
        return np.array(tokens + [7] * (tail % self.page_size), np.int32)

    def prefixes(self, ids: np.ndarray | Prefix) -> list[Prefix]:
        size = self.page_size
        tokens = tuple(int(token) for token in ids)
        return [tokens[:end] for end in range(size, len(tokens) + 1, size)]

    def cached(self, ids: np.ndarray) -> list[Prefix]:
        found = []
        for prefix in self.prefixes(ids):
            if prefix not in self.pages:
                break
            found.append(prefix)
        return found

    def protected(self) -> set[Prefix]:
        return {prefix for held in self.known if held.locks for prefix in self.prefixes(held.prefix)}

    def use(self, prefixes: list[Prefix]) -> None:
        self.clock += 1
        for prefix in prefixes:
            self.used[prefix] = self.clock

    def fresh_slots(self, count: int) -> np.ndarray:
        first = self.next_page * self.page_size
        self.next_page += -(-count // self.page_size)
        return np.arange(first, first + count, dtype=np.int32)

    def keep(self, handle: CacheHandle, ids: np.ndarray) -> Held:
        held = Held(handle, tuple(int(token) for token in ids[: handle.cached_len]))
        self.known.append(held)
        return held

    # -- what callers do -----------------------------------------------------------------------------------------

    @rule(target=handles, names=page_names, tail=st.integers(0, 2))
    def match(self, names: list[int], tail: int) -> Held:
        ids = self.ids(names, tail)
        found = self.cached(ids)
        assert self.cache.peek(ids) == len(found) * self.page_size
        handle, indices = self.cache.match_prefix(ids)
        assert handle.cached_len == len(found) * self.page_size
        self.check_slots(indices, found)
        self.use(found)
        return self.keep(handle, ids)

    @rule(target=handles, names=page_names, tail=st.integers(0, 2))
    def insert(self, names: list[int], tail: int) -> Held:
        ids = self.ids(names, tail)
        return self.insert_ids(ids, None)

    @rule(target=handles, held=handles, names=page_names, tail=st.integers(0, 2))
    def match_on(self, held: Held, names: list[int], tail: int) -> Held:
        """Go on from a handle; the tokens before it are not read."""
        ids = np.concatenate([np.array(held.prefix, np.int32), self.ids(names, tail)])
        unread = ids.copy()
        unread[: held.handle.cached_len] = -1
        if held.evicted:
            with pytest.raises(CacheError, match="stale"):
                self.cache.match_prefix(unread, start=held.handle)
            return multiple()
        found = self.cached(ids)
        handle, indices = self.cache.match_prefix(unread, start=held.handle)
        assert handle.cached_len == len(found) * self.page_size
        self.check_slots(indices, found[len(held.prefix) // self.page_size :])
        self.use(found)
        return self.keep(handle, ids)

    @rule(target=handles, held=handles, names=page_names, tail=st.integers(0, 2))
    def insert_on(self, held: Held, names: list[int], tail: int) -> Held:
        ids = np.concatenate([np.array(held.prefix, np.int32), self.ids(names, tail)])
        if held.evicted:
            with pytest.raises(CacheError, match="stale"):
                self.cache.insert_prefix(ids, self.fresh_slots(len(ids) - len(held.prefix)), start=held.handle)
            return multiple()
        return self.insert_ids(ids, held)

    @rule(held=handles)
    def lock(self, held: Held) -> None:
        if held.evicted:
            with pytest.raises(CacheError, match="stale"):
                self.cache.lock_handle(held.handle)
            return
        self.cache.lock_handle(held.handle)
        held.locks += 1

    @rule(held=handles)
    def unlock(self, held: Held) -> None:
        if held.evicted:
            with pytest.raises(CacheError, match="stale"):
                self.cache.lock_handle(held.handle, unlock=True)
        elif not any(other.locks for other in self.known if other.prefix == held.prefix):
            with pytest.raises(CacheError, match="not locked"):
                self.cache.lock_handle(held.handle, unlock=True)
        elif held.locks:
            before = self.protected()
            self.cache.lock_handle(held.handle, unlock=True)
            held.locks -= 1
            self.use(list(before - self.protected()))

    @rule(held=handles, longer=handles)
    def move_lock(self, held: Held, longer: Held) -> None:
        if longer.prefix[: len(held.prefix)] != held.prefix:
            return
        if held.evicted or longer.evicted:
            with pytest.raises(CacheError, match=r"stale|not locked"):
                self.cache.move_lock(held.handle, longer.handle)
        elif not any(other.locks for other in self.known if other.prefix == held.prefix):
            with pytest.raises(CacheError, match="not locked"):
                self.cache.move_lock(held.handle, longer.handle)
        elif held.locks:
            self.cache.move_lock(held.handle, longer.handle)
            held.locks -= 1
            longer.locks += 1

    @rule(share=st.floats(0, 1), partial=st.booleans())
    def evict(self, share: float, partial: bool) -> None:
        protected = self.protected()
        evictable = [prefix for prefix in self.pages if prefix not in protected]
        wanted = int(share * len(evictable) * self.page_size)
        slots = self.cache.evict(wanted, partial)
        pages = -(-wanted // self.page_size)
        starts = slots[:: self.page_size]
        assert slots.dtype == np.int32
        assert len(slots) == len(starts) * self.page_size
        assert (page_slots(starts, self.page_size) == slots).all()
        assert len(starts) == pages if partial else len(starts) >= pages
        by_page = {page: prefix for prefix, page in self.pages.items()}
        gone = {by_page[int(start)] for start in starts}
        assert len(gone) == len(starts)
        assert not gone & protected
        for prefix in gone:
            del self.pages[prefix]
        for prefix in self.pages:
            assert len(prefix) == self.page_size or prefix[: -self.page_size] in self.pages, "evicted from the middle"
        kept = [self.used[prefix] for prefix in evictable if prefix not in gone]
        assert not gone or not kept or max(self.used[prefix] for prefix in gone) <= min(kept), "evicted out of order"
        for held in self.known:
            held.evicted |= any(prefix in gone for prefix in self.prefixes(held.prefix))

    @rule(excess=st.integers(1, 20))
    def evict_too_much(self, excess: int) -> None:
        sizes = self.cache.size_info
        with pytest.raises(CacheError, match="cannot evict"):
            self.cache.evict(sizes.evictable_size + excess)
        assert self.cache.size_info == sizes

    @rule(held=handles)
    def forget(self, held: Held) -> None:
        if held.evicted:
            with pytest.raises(CacheError, match="stale"):
                self.cache.forget(held.handle)
            return
        slots = self.cache.forget(held.handle)
        protected, gone = self.protected(), []
        for prefix in reversed(self.prefixes(held.prefix)):
            if prefix in protected or any(other[: len(prefix)] == prefix != other for other in self.pages):
                break
            gone.append(self.pages.pop(prefix))
        assert sorted(slots[:: self.page_size].tolist()) == sorted(gone)
        for each in self.known:
            each.evicted |= any(prefix not in self.pages for prefix in self.prefixes(each.prefix))

    @rule(held=consumes(handles))
    def drop(self, held: Held) -> None:
        if held.locks == 0:
            self.known.remove(held)

    @rule(really=st.integers(0, 9))
    def reset(self, really: int) -> None:
        if really:
            return
        self.cache.reset()
        self.pages.clear()
        for held in self.known:
            held.locks = 0
            held.evicted = True

    @rule()
    def router_reads(self) -> None:
        change = self.digest.take_changes()
        if change.full:
            self.router.clear()
        assert set(change.removed.tolist()) <= self.router
        self.router -= set(change.removed.tolist())
        assert not set(change.added.tolist()) & self.router
        self.router |= set(change.added.tolist())
        assert self.router == set(self.digest.hashes().tolist())

    # -- checks --------------------------------------------------------------------------------------------------

    def insert_ids(self, ids: np.ndarray, held: Held | None) -> Held:
        begin = len(held.prefix) if held else 0
        slots = self.fresh_slots(len(ids) - begin)
        found = self.cached(ids)
        result = self.cache.insert_prefix(ids, slots, start=held.handle if held else None)
        assert result.cached_len == len(found) * self.page_size
        assert result.handle.cached_len == len(ids) // self.page_size * self.page_size
        for prefix in self.prefixes(ids)[len(found) :]:
            self.pages[prefix] = int(slots[len(prefix) - self.page_size - begin])
        self.use(self.prefixes(ids))
        return self.keep(result.handle, ids)

    def check_slots(self, indices: np.ndarray, prefixes: list[Prefix]) -> None:
        starts = np.array([self.pages[prefix] for prefix in prefixes], np.int32)
        assert indices.dtype == np.int32
        assert indices.tolist() == page_slots(starts, self.page_size).tolist()

    @invariant()
    def sizes_and_structure(self) -> None:
        protected = len(self.protected())
        expected = ((len(self.pages) - protected) * self.page_size, protected * self.page_size)
        assert self.cache.size_info == expected
        assert sorted(self.cache.page_starts()) == sorted(self.pages.values())
        self.cache.check_integrity([held.handle for held in self.known for _ in range(held.locks)])

    @invariant()
    def digest_is_the_cached_prefixes(self) -> None:
        held = self.digest.hashes().tolist()
        block = self.digest.granularity
        assert len(held) == len(set(held)) == len(self.digest) <= self.digest.max_hashes
        chains = [prefix_hashes(np.array(p, np.int32), block).tolist() for p in self.pages if len(p) % block == 0]
        assert set(held) <= {chain[-1] for chain in chains}
        assert all(set(chain) <= set(held) for chain in chains if chain[-1] in held), "a prefix without a shorter one"
        if self.digest.max_hashes > 1000:
            assert len(held) == len(chains)


CI = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_any_calls_in_any_order() -> None:
    run_state_machine_as_test(RadixMachine, settings=CI)


@pytest.mark.full_grid
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(20))
def test_any_calls_in_any_order_10_000_examples(part: int) -> None:
    machine = seed(part)(type("Part", (RadixMachine,), {}))
    run_state_machine_as_test(machine, settings=settings(CI, max_examples=500, print_blob=True))
