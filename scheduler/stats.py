"""What a scheduler can be asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerStats:
    """A snapshot of load, memory and totals since the start. Pages unless they say tokens."""

    running: int
    waiting: int
    free_pages: int
    total_pages: int
    cached_pages: int
    evictable_pages: int  # of the cached: in use by nobody
    prefilled_tokens: int  # input tokens computed in prefill
    cached_tokens: int  # input tokens served from the prefix cache instead
    preemptions: int
    steps: int
    in_flight: int
