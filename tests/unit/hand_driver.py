"""`HandDriver`: plans written by hand, for worker tests that must not depend on the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scheduler.step import StepPlan, StepPlanWriter, StepResult, pack_sampling


@dataclass
class HandRow:
    """One request: its tokens so far and how many of them have K/V."""

    row: int
    tokens: list[int]
    prompt_len: int
    cached_len: int = 0
    admitted: bool = False
    pages: list[int] = field(default_factory=list)
    sampling: dict = field(default_factory=dict)
    suppress: tuple[int, list[int]] | None = None


class HandDriver:
    """Pages are handed out in reverse order, so that slots are not positions by accident."""

    def __init__(self, max_rows: int, num_pages: int, page_size: int, ring: int = 4) -> None:
        self.page_size = page_size
        self.dummy_row, self.dummy_slot = max_rows, num_pages * page_size
        self._free = list(range(num_pages))
        self._writer = StepPlanWriter(ring)
        self._step_id = 0

    def request(
        self, row: int, prompt: list[int], *, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0,
        min_p: float = 0.0, seed: int = 0, suppress: tuple[int, list[int]] | None = None,
    ) -> HandRow:  # fmt: skip
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
        return HandRow(row, list(prompt), len(prompt), sampling=sampling, suppress=suppress)

    def plan(self, work: list[tuple[HandRow, int]], padded_rows: int | None = None) -> StepPlan:
        """A step that computes `count` more tokens of each row. A row whose last token is computed is sampled.

        A decode entry is a row with one token to go that was sampled on the device: its token does not travel.
        """
        decodes = [(r, n) for r, n in work if n == 1 and r.cached_len >= r.prompt_len]
        prefills = [(r, n) for r, n in work if not (n == 1 and r.cached_len >= r.prompt_len)]
        ordered = decodes + prefills
        deltas, runs, run_tokens, out_loc, sample = [], [], [], [], []
        for index, (row, count) in enumerate(ordered):
            end = row.cached_len + count
            while len(row.pages) * self.page_size < end:
                deltas.append((row.row, len(row.pages) * self.page_size, self._free[-1] * self.page_size))
                row.pages.append(self._free.pop())
            for position in range(row.cached_len, end):
                out_loc.append(row.pages[position // self.page_size] * self.page_size + position % self.page_size)
            if index >= len(decodes):
                runs.append((row.row, row.cached_len, count))
                run_tokens += row.tokens[row.cached_len : end]
            if end == len(row.tokens):
                sample.append(index)
        admitted = [r for r, _ in ordered if not r.admitted]
        suppressed = [r for r in admitted if r.suppress]
        padded = len(ordered) if padded_rows is None else padded_rows
        padding = padded - len(ordered)
        self._step_id += 1
        plan = self._writer.begin(
            step_id=self._step_id, num_rows=len(ordered), num_decode=len(decodes), num_samples=len(sample),
            num_tokens=len(out_loc), padded_rows=padded, padded_tokens=len(out_loc) + padding,
            page_deltas=len(deltas), token_runs=len(runs), run_tokens=len(run_tokens), sampling=len(admitted),
            suppress_runs=len(suppressed), suppress_ids=sum(len(r.suppress[1]) for r in suppressed),
        )  # fmt: skip
        plan.rows[:] = [r.row for r, _ in ordered] + [self.dummy_row] * padding
        plan.cached_len[:] = [r.cached_len for r, _ in ordered] + [0] * padding
        plan.device_len[:] = [r.cached_len + n for r, n in ordered] + [1] * padding
        plan.sample[:] = sample + list(range(len(sample), padded))
        plan.out_loc[:] = out_loc + [self.dummy_slot] * padding
        plan.page_deltas[:] = np.array(deltas, dtype=np.int32).reshape(-1, 3)
        plan.token_runs[:] = np.array(runs, dtype=np.int32).reshape(-1, 3)
        plan.run_tokens[:] = run_tokens
        for entry, r in zip(plan.sampling, admitted, strict=True):
            pack_sampling(entry, row=r.row, prompt_len=r.prompt_len, **r.sampling)
        plan.suppress_runs[:] = np.array(
            [(r.row, r.suppress[0], len(r.suppress[1])) for r in suppressed], dtype=np.int32
        ).reshape(-1, 3)
        plan.suppress_ids[:] = [i for r in suppressed for i in r.suppress[1]]
        for row, count in ordered:
            row.admitted = True
            row.cached_len += count
        self._sampled = [ordered[i][0] for i in sample]
        return StepPlan.decode(plan.seal().buffer.tobytes())

    def process(self, result: StepResult) -> None:
        """Append the tokens of the latest plan to their rows."""
        assert result.step_id == self._step_id and len(result.tokens) == len(self._sampled)
        for row, token in zip(self._sampled, result.tokens.tolist(), strict=True):
            row.tokens.append(token)

    def release(self, row: HandRow) -> None:
        self._free += row.pages
        row.pages = []
