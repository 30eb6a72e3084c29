"""Hot state of running requests: arrays indexed by row, so that a decode step is a few numpy calls."""

from __future__ import annotations

import numpy as np

from scheduler.constraint import Constraint


class RowState:
    """One entry per row of the page table. Rows are handed out lowest first on a fresh state.

    Arrays (one entry per row):

    ==============  =====  ==============================================================================
    request_id      int64  whose row it is
    cached_len      int32  tokens whose K/V is stored by the steps planned so far
    device_len      int32  tokens after the next input; of a running decode always cached_len + 1
    known_len       int32  tokens the driver knows (the prompt and returned results)
    end_len         int32  prompt_len + max_tokens
    stop_from       int32  first position at which a stop token may stop the request (min_tokens)
    stop_ids        int32  [columns, rows] tokens that stop the request, padded with -1
    cached_prompt   int32  prompt tokens that came from the prefix cache at first admission
    next_slot       int32  of a running decode: the slot after its last one, good unless a new page begins
    last_plan       int64  id of the last plan that uses the row
    accepts         bool   results are still wanted: not finished, not aborted
    decoding        bool   planned as a decode
    constrained     bool   has an entry in `constraints`
    ==============  =====  ==============================================================================

    `page_table[row, page]` is a page's first slot, `tokens[row, position]` a known token. `constraints` are those of
    the rows that have one.
    """

    def __init__(self, num_rows: int, pages_per_row: int, page_size: int, stop_columns: int = 1) -> None:
        self.num_rows = num_rows
        self.page_size = page_size
        self.request_id = np.zeros(num_rows, dtype=np.int64)
        self.cached_len = np.zeros(num_rows, dtype=np.int32)
        self.device_len = np.zeros(num_rows, dtype=np.int32)
        self.known_len = np.zeros(num_rows, dtype=np.int32)
        self.end_len = np.zeros(num_rows, dtype=np.int32)
        self.stop_from = np.zeros(num_rows, dtype=np.int32)
        self.stop_ids = np.full((max(stop_columns, 1), num_rows), -1, dtype=np.int32)
        self.cached_prompt = np.zeros(num_rows, dtype=np.int32)
        self.next_slot = np.zeros(num_rows, dtype=np.int32)
        self.last_plan = np.zeros(num_rows, dtype=np.int64)
        self.accepts = np.zeros(num_rows, dtype=bool)
        self.decoding = np.zeros(num_rows, dtype=bool)
        self.constrained = np.zeros(num_rows, dtype=bool)
        self.constraints: dict[int, Constraint] = {}
        self.page_table = np.zeros((num_rows, pages_per_row), dtype=np.int32)
        self.tokens = np.zeros((num_rows, pages_per_row * page_size), dtype=np.int32)
        self.flat_tokens = self.tokens.reshape(-1)
        self.flat_pages = self.page_table.reshape(-1)
        self.token_base = np.arange(num_rows, dtype=np.int64) * self.tokens.shape[1]
        self.page_base = np.arange(num_rows, dtype=np.int64) * pages_per_row
        self._offsets = np.tile(np.arange(page_size, dtype=np.int32), pages_per_row)  # by position, in its page
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def free_rows(self) -> int:
        return len(self._free)

    @property
    def used_rows(self) -> int:
        return self.num_rows - len(self._free)

    def acquire(self) -> int:
        return self._free.pop()

    def release(self, row: int) -> None:
        self.accepts[row] = False
        self.set_constraint(row, None)
        self._free.append(row)

    def num_pages(self, row: int) -> int:
        """Pages a row holds: just enough for `cached_len`."""
        return -(-int(self.cached_len[row]) // self.page_size)

    def write_slots(self, row: int, first: int, end: int, out: np.ndarray) -> None:
        """The slots of a row's positions `first .. end` into `out`, int32[end - first]."""
        size = self.page_size
        starts = self.page_table[row, first // size : -(-end // size)].repeat(size)
        skip = first % size
        np.add(starts[skip : skip + end - first], self._offsets[first:end], out=out)

    def slot(self, row: int, position: int) -> int:
        page = position // self.page_size
        return int(self.page_table[row, page]) + position - page * self.page_size

    def set_stop_ids(self, row: int, ids: tuple[int, ...]) -> None:
        """Tokens that end the row's request; widens the table for all rows when they are many."""
        if len(ids) > len(self.stop_ids):
            more = np.full((len(ids) - len(self.stop_ids), self.num_rows), -1, dtype=np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, more])
        self.stop_ids[:, row] = -1
        if ids:
            self.stop_ids[: len(ids), row] = ids

    def set_constraint(self, row: int, constraint: Constraint | None) -> None:
        """What the row's output must follow; None: nothing."""
        self.constrained[row] = constraint is not None
        if constraint is not None:
            self.constraints[row] = constraint
        else:
            self.constraints.pop(row, None)

    def reset(self) -> None:
        """All rows are free and empty."""
        self.cached_len[:] = 0
        self.accepts[:] = False
        self.decoding[:] = False
        self.constrained[:] = False
        self.constraints.clear()
        self._free = list(range(self.num_rows - 1, -1, -1))
