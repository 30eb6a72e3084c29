"""What the radix tree costs, counted: bytes copied, lines run, memory kept."""

from __future__ import annotations

import subprocess
import sys

from kvcache import RadixPrefixCache
from tests.unit.radix_text import span
from tests.unit.work import lines_run, peak_bytes


def test_memory_per_token() -> None:
    """At most 20 bytes a cached token in the process, whatever arrays the slots and ids came from."""
    script = """
import gc, sys
import numpy as np, psutil
from kvcache import RadixPrefixCache
def fill(prompts):
    cache = RadixPrefixCache(16)
    for i in range(prompts):
        ids = np.random.randint(0, 100_000, 100_000).astype(np.int32)  # views of these must not stay
        cache.insert_prefix(ids[:4096], np.arange(i * 4096, (i + 1) * 4096, dtype=np.int32))
        for cut in range(256, 4096, 256):
            ids[cut] += 1
            cache.match_prefix(ids[:4096])
            ids[cut] -= 1
    return cache
fill(4)
gc.collect()
before = psutil.Process().memory_info().rss
cache = fill(250)
gc.collect()
print((psutil.Process().memory_info().rss - before) / cache.size_info.total_size)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) <= 20


def test_going_on_costs_what_is_new() -> None:
    """A match from a handle copies nothing of what lies before it; one from the start copies the whole prompt."""
    cache = RadixPrefixCache(page_size=16)
    ids = span(0, 1 << 18)
    handle = cache.insert_prefix(ids, span(0, len(ids))).handle
    cache.lock_handle(handle)
    assert peak_bytes(lambda: cache.match_prefix(ids, start=handle)) < 4096
    assert peak_bytes(lambda: cache.match_prefix(ids)) >= ids.nbytes


def test_moving_a_lock_costs_what_lies_between() -> None:
    """A prefill in chunks puts one node under the other: the hundredth costs what the second did."""
    cache = RadixPrefixCache(page_size=4)
    ids, costs = span(0, 400), []
    held = cache.insert_prefix(ids[:4], span(0, 4)).handle
    cache.lock_handle(held)
    for end in range(8, 401, 4):
        longer = cache.insert_prefix(ids[:end], span(end - 4, 4), start=held).handle
        costs.append(lines_run(lambda held=held, longer=longer: cache.move_lock(held, longer)))
        held = longer
    assert set(costs) == {costs[0]}
    cache.check_integrity([held])
    assert cache.size_info == (0, 400)


def test_evicting_costs_what_is_freed() -> None:
    """Freeing 64 pages runs as many lines in a tree of 10,000 leaves as in one of 300."""

    def cost(leaves: int) -> int:
        cache = RadixPrefixCache(page_size=4)
        for i in range(leaves):
            cache.insert_prefix(span(4 * i, 4), span(4 * i, 4))
        return lines_run(lambda: cache.evict(256))

    assert cost(10_000) == cost(300)
