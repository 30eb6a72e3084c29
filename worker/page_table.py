"""`PageTable`: which slot holds the token at (row, position), mirrored on the rank's device."""

from __future__ import annotations

import torch


class PageTable:
    """Device mirror of the driver's page table, one entry per page, behind an accessor that speaks slots.

    `page_starts` is int32[num_rows + 1, max_pages]: the first slot of each page. The last row is the dummy row, and
    every entry starts out as the dummy page (page `num_pages`), so a row that was never assigned reads valid memory.

    Args:
        num_rows: rows for running requests (`max_running_requests`); the dummy row has this index.
        max_seq_len: tokens a row can hold; rounded up to whole pages.
        num_pages: usable pages of the pool; the dummy page has this index.
    """

    def __init__(
        self, num_rows: int, max_seq_len: int, page_size: int, num_pages: int, device: torch.device | str
    ) -> None:
        self.page_size = page_size
        self.dummy_row = num_rows
        self.dummy_slot = num_pages * page_size
        max_pages = -(-max_seq_len // page_size)
        self.page_starts = torch.full((num_rows + 1, max_pages), self.dummy_slot, dtype=torch.int32, device=device)

    def apply(self, deltas: torch.Tensor) -> None:
        """Write a plan's page deltas: int32[n, 3] of (row, first position, page's first slot), all on the device.

        No two deltas of one plan name the same page of a row.
        """
        if self.page_starts.is_cuda:
            from worker.kernels.plan_sections import apply_page_deltas  # triton comes with torch for CUDA only

            apply_page_deltas(deltas, self.page_starts, self.page_size)
            return
        rows, positions, starts = deltas.unbind(1)
        self.page_starts[rows.long(), torch.div(positions, self.page_size, rounding_mode="floor").long()] = starts

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots of (rows, positions), broadcast against each other: int64."""
        rows, positions = rows.long(), positions.long()
        if self.page_size == 1:
            return self.page_starts[rows, positions].long()
        page = torch.div(positions, self.page_size, rounding_mode="floor")
        return self.page_starts[rows, page].long() + (positions - page * self.page_size)
