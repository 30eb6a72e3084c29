"""The scheduler's settings: plain numbers, fixed when the workers have said how much memory there is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes are tokens unless they say otherwise. Raises ValueError for values that cannot work.

    `pad_sizes` are the batch sizes of captured decode graphs: a plan of decodes only is padded to the next of them.
    `overlap_depth` is how many plans may be in flight. `max_seq_len` need not be a multiple of `page_size`: rows of
    the page table are rounded up to whole pages.
    """

    num_pages: int
    page_size: int
    max_running_requests: int
    max_seq_len: int
    max_step_tokens: int
    cache_type: str = "radix"
    overlap_depth: int = 2
    eos_token_ids: tuple[int, ...] = ()
    pad_sizes: tuple[int, ...] = ()
    policy: str = "fcfs"

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size", "max_running_requests", "max_step_tokens", "overlap_depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_seq_len < 2:
            raise ValueError(f"max_seq_len must hold a prompt and a token, so at least 2, got {self.max_seq_len}")
        if (self.num_pages + 1) * self.page_size > 2**31 - 1:
            raise ValueError(f"{self.num_pages} pages of {self.page_size} slots exceed what int32 slots can name")
        if any(size < 1 for size in self.pad_sizes):
            raise ValueError(f"pad_sizes must be positive, got {self.pad_sizes}")

    @property
    def pages_per_row(self) -> int:
        """Columns of the page table."""
        return -(-self.max_seq_len // self.page_size)
