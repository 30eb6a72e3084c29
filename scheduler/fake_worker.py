"""`FakeWorker`: executes step plans without a model, and knows right from wrong.

It mirrors what a real worker holds (page table, token pool, sampling entries by row) and keeps, for every slot, the
token stored there, its position, the step that stored it and the content (a 64-bit hash, `fake_model`) of everything
up to it. A step is one forward pass: all stores of the step come before any attention, so a row may read what another
row of the same step writes, and every row is checked after all stores. A row's prefix that the host never sent (it was
found in the prefix cache) is read from the slots and must be one unbroken sequence there; later steps must find the
same. The next token is a hash of the row's content, so whatever escapes the checks changes the output.
"""

from __future__ import annotations

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.fake_extras import FakeExtras, has_repeats
from scheduler.fake_model import FakeModel, content_sums, token_words
from scheduler.step import PlanFlags, S, StepPlan, StepResult


class FakeWorkerError(RuntimeError):
    """A plan that a real worker would turn into wrong tokens; names the step, row, position and slot at fault."""


class FakeWorker:
    """Executes plans in step order. After a recovery make a new one: the real workers are new as well.

    Args:
        config: the scheduler's (uses num_pages, page_size, max_running_requests, max_seq_len, pad_sizes).
        model: what to sample; default `FakeModel(eos_token_id=first of config.eos_token_ids)`.
        full_check: compare every position of every row at every step, O(total length). Off, a decode row's last
            stored slot is compared, whose content covers all before it: O(rows), for benchmarks and the simulator.
    """

    def __init__(self, config: SchedulerConfig, model: FakeModel | None = None, *, full_check: bool = True) -> None:
        self.config = config
        self.model = model or FakeModel(eos_token_id=config.eos_token_ids[0] if config.eos_token_ids else 0)
        self.full_check = full_check
        self.prefilled_tokens = 0  # input tokens that came from the host so far
        self.step_id: int | None = None
        rows, size = config.max_running_requests + 1, config.page_size
        pages = -(-config.max_seq_len // size)
        slots = (config.num_pages + 1) * size
        self.dummy_row, self.dummy_slot = config.max_running_requests, config.num_pages * size
        self.page_table = np.full((rows, pages), -1, dtype=np.int32)
        self.token_pool = np.full((rows, pages * size + 1), -1, dtype=np.int32)
        # content[row, n]: of the row's first n tokens; known_len[row]: how many of its tokens the device has.
        self.content = np.zeros((rows, pages * size + 2), dtype=np.uint64)
        self.known_len = np.zeros(rows, dtype=np.int64)
        self.has_sampling = np.zeros(rows, dtype=bool)
        self.sampling_key = np.zeros(rows, dtype=np.uint64)
        self.suppress_until = np.zeros(rows, dtype=np.int64)
        self.suppressed: dict[int, list[int]] = {}
        self._extras = FakeExtras(rows, self._fail)
        self.slot_token = np.full(slots, -1, dtype=np.int32)
        self.slot_position = np.full(slots, -1, dtype=np.int32)
        self.slot_content = np.zeros(slots, dtype=np.uint64)
        self.slot_step = np.full(slots, -1, dtype=np.int64)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step.

        Raises:
            FakeWorkerError: the plan breaks a rule of the message or reads a slot that does not hold its row's prefix.
        """
        step = plan.step_id
        if self.step_id is not None and step != self.step_id + 1 and not plan.flags & PlanFlags.SNAPSHOT:
            raise FakeWorkerError(f"step {step} arrived after step {self.step_id}")
        self.step_id = step
        self._check_shape(plan)
        self._apply_admissions(plan)
        self._apply_page_deltas(plan)
        runs = self._token_runs(plan)
        self._store(plan, runs)
        self._check_prefixes(plan)
        self._extras.apply(plan, self.token_pool)
        tokens = self._sample(plan)
        self.prefilled_tokens += len(plan.run_tokens)
        return StepResult(step, tokens, *self._extras.answer(plan, tokens))

    def slots(self, row: int, first: int, end: int) -> np.ndarray:
        """Slots the page table names for positions first .. end of a row, int32; negative where no page is set."""
        return self._slots(np.full(end - first, row), np.arange(first, end))

    def _slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        size = self.config.page_size
        starts = self.page_table[rows, positions // size]
        return np.where(starts < 0, -1, starts + positions % size)

    def _fail(self, message: str) -> None:
        raise FakeWorkerError(f"step {self.step_id}: {message}")

    def _check_shape(self, plan: StepPlan) -> None:
        n, tokens, samples = plan.num_rows, plan.num_tokens, plan.num_samples
        rows, cached, device = plan.rows[:n], plan.cached_len[:n], plan.device_len[:n]
        extend = device - cached
        if n == 0:
            self._fail("no rows")
        if has_repeats(rows) or rows.min() < 0 or rows.max() >= self.dummy_row:
            self._fail(f"rows repeat or leave 0..{self.dummy_row - 1}: {rows.tolist()}")
        if cached.min() < 0 or extend.min() < 1 or device.max() > self.page_table.shape[1] * self.config.page_size:
            self._fail(f"bad lengths: cached {cached.tolist()}, device {device.tolist()}")
        if extend.sum() != tokens or (extend[: plan.num_decode] != 1).any():
            self._fail(f"extend_len {extend.tolist()} for {tokens} tokens and {plan.num_decode} decode entries")
        if tokens > self.config.max_step_tokens:
            self._fail(f"{tokens} tokens exceed the budget of {self.config.max_step_tokens}")
        sample = plan.sample[:samples]
        if samples and (sample[0] < 0 or sample[-1] >= n or (np.diff(sample) <= 0).any()):
            self._fail(f"sample must ascend within 0..{n - 1}: {sample.tolist()}")
        padding = plan.padded_rows - n
        if plan.padded_tokens - tokens != padding:
            self._fail(f"{padding} padding rows but {plan.padded_tokens - tokens} padding tokens")
        expected = [(plan.rows[n:], self.dummy_row), (plan.cached_len[n:], 0), (plan.device_len[n:], 1)]
        expected += [(plan.out_loc[tokens:], self.dummy_slot)]
        if any((have != want).any() for have, want in expected):
            self._fail("padding does not name the dummy row and the dummy page")
        if (plan.sample[samples:] != np.arange(samples, plan.padded_rows)).any():
            self._fail(f"padding of sample is not the identity: {plan.sample[samples:].tolist()}")

    def _apply_admissions(self, plan: StepPlan) -> None:
        """A sampling entry says that the row has a new owner: forget everything the old one left."""
        rows = plan.sampling[:, S.ROW]
        if has_repeats(rows) or (len(rows) and (rows.min() < 0 or rows.max() >= self.dummy_row)):
            self._fail(f"sampling entries repeat rows or leave 0..{self.dummy_row - 1}: {rows.tolist()}")
        self.page_table[rows] = -1
        self.known_len[rows] = 0
        self.suppress_until[rows] = 0
        self.has_sampling[rows] = True
        self.sampling_key[rows] = self.model.sampling_keys(plan.sampling)
        at = 0
        for row, until, count in plan.suppress_runs.tolist():
            if row not in rows:
                self._fail(f"suppress run for row {row}, which is not admitted in this step")
            self.suppress_until[row] = until
            self.suppressed[row] = plan.suppress_ids[at : at + count].tolist()
            at += count

    def _apply_page_deltas(self, plan: StepPlan) -> None:
        size = self.config.page_size
        rows, positions, starts = plan.page_deltas.T
        wrong = (
            (rows < 0) | (rows >= self.dummy_row) | (positions < 0) | (positions // size >= self.page_table.shape[1])
        )
        wrong |= (positions % size != 0) | (starts % size != 0) | (starts < 0) | (starts >= self.dummy_slot)
        if wrong.any():
            self._fail(
                f"page delta (row, position, slot) out of range or unaligned: {plan.page_deltas[wrong][0].tolist()}"
            )
        places = rows.astype(np.int64) * self.page_table.shape[1] + positions // size
        if has_repeats(places):
            self._fail(f"two page deltas for one place: {plan.page_deltas.tolist()}")
        self.page_table[rows, positions // size] = starts

    def _token_runs(self, plan: StepPlan) -> dict[int, tuple[int, np.ndarray]]:
        runs: dict[int, tuple[int, np.ndarray]] = {}
        at = 0
        for row, first, count in plan.token_runs.tolist():
            if row in runs or count < 1:
                self._fail(f"token run of {count} tokens for row {row}, or a second one")
            runs[row] = (first, plan.run_tokens[at : at + count])
            at += count
        return runs

    def _store(self, plan: StepPlan, runs: dict[int, tuple[int, np.ndarray]]) -> None:
        """All stores of the step. Decode entries as arrays; prefill entries after those whose stores they read."""
        n, step, size = plan.num_rows, plan.step_id, self.config.page_size
        rows, cached, device = plan.rows[:n], plan.cached_len[:n], plan.device_len[:n]
        if not self.has_sampling[rows].all():
            self._fail(f"row {rows[~self.has_sampling[rows]][0]} was never given sampling parameters")
        extend = device - cached
        offsets = np.concatenate(([0], np.cumsum(extend)))
        positions = np.arange(plan.num_tokens) - np.repeat(offsets[:-1] - cached, extend)
        out_loc = plan.out_loc[: plan.num_tokens]
        named = self._slots(np.repeat(rows, extend), positions)
        if (out_loc != named).any():
            at = int(np.flatnonzero(out_loc != named)[0])
            row = int(np.repeat(rows, extend)[at])
            self._fail(f"out_loc {out_loc[at]} for row {row} position {positions[at]}, page table names {named[at]}")
        if has_repeats(out_loc):
            self._fail(f"two tokens of the step are stored in one slot: {np.sort(out_loc).tolist()}")

        d = plan.num_decode
        with_run = np.array([row in runs for row in rows[:d].tolist()], dtype=bool) if runs else np.zeros(d, dtype=bool)
        fast = np.flatnonzero(~with_run)
        self._store_decodes(rows[:d][fast], cached[:d][fast], out_loc[:d][fast], step)
        waiting = [*np.flatnonzero(with_run).tolist(), *range(d, n)]
        # By page: entries of this step yet to store in it.
        pending = np.zeros(len(self.slot_step) // size, dtype=np.int32)
        pages_of = {i: self.page_table[rows[i], cached[i] // size : -(-device[i] // size)] // size for i in waiting}
        for i in waiting:
            pending[pages_of[i]] += 1
        while waiting:
            still = []
            for i in waiting:
                row, first, end = int(rows[i]), int(cached[i]), int(device[i])
                prefix = self.slots(row, 0, first)
                pending[pages_of[i]] -= 1  # a row never waits for itself
                if first and pending[prefix // size].any():
                    pending[pages_of[i]] += 1
                    still.append(i)
                    continue
                self._learn_prefix(row, prefix, before_step=step if i < d else step + 1)
                if row not in runs:
                    self._fail(f"prefill entry {i} (row {row}, positions {first}..{end - 1}) came without its tokens")
                ahead = int(bool(plan.flags & PlanFlags.SNAPSHOT) and runs[row][0] + len(runs[row][1]) == end + 1)
                self._store_run(row, first, end, runs.pop(row), out_loc[offsets[i] : offsets[i + 1]], step, ahead)
            if len(still) == len(waiting):
                self._fail(f"prefill entries {still} wait for each other's stores")
            waiting = still
        if runs:
            self._fail(f"token runs for rows without an entry: {sorted(runs)}")

    def _store_decodes(self, rows: np.ndarray, cached: np.ndarray, out_loc: np.ndarray, step: int) -> None:
        """One token per row, sampled on the device by an earlier step; prefixes must be stored by then."""
        unknown = self.known_len[rows] != cached + 1
        if unknown.any():
            row, length = int(rows[unknown][0]), int(cached[unknown][0])
            self._fail(
                f"decode row {row} inputs position {length}, the device knows {self.known_len[row]} tokens of it"
            )
        before = self._slots(rows, np.maximum(cached - 1, 0))
        late = (cached > 0) & ((before < 0) | (self.slot_step[before] >= step))
        if late.any():
            self._fail(f"decode row {rows[late][0]}: its prefix is not stored by an earlier step")
        self.slot_token[out_loc] = self.token_pool[rows, cached]
        self.slot_position[out_loc] = cached
        self.slot_content[out_loc] = self.content[rows, cached + 1]
        self.slot_step[out_loc] = step

    def _learn_prefix(self, row: int, prefix: np.ndarray, before_step: int) -> None:
        """Check a prefill entry's prefix slots; take over the tokens that the host never sent for this row."""
        end = len(prefix)
        if end and prefix.min() < 0:
            self._fail(f"row {row} reads position {int(np.flatnonzero(prefix < 0)[0])}, which has no page")
        known = min(int(self.known_len[row]), end)
        new = prefix[known:]
        sums = content_sums(self.slot_token[new], known, int(self.content[row, known]))
        good = (self.slot_content[new] == sums) & (self.slot_position[new] == np.arange(known, end))
        good &= (self.slot_step[new] >= 0) & (self.slot_step[new] < before_step)
        if not good.all():
            at = int(np.flatnonzero(~good)[0])
            slot = int(new[at])
            self._fail(
                f"row {row} position {known + at} reads slot {slot}, which holds position {self.slot_position[slot]} "
                f"(token {self.slot_token[slot]}, stored in step {self.slot_step[slot]}) of another sequence"
            )
        self.token_pool[row, known:end] = self.slot_token[new]
        self.content[row, known + 1 : end + 1] = sums
        self.known_len[row] = max(int(self.known_len[row]), end)

    def _store_run(
        self, row: int, first: int, end: int, run: tuple[int, np.ndarray], out_loc: np.ndarray, step: int, ahead: int
    ) -> None:
        """`ahead`: tokens in the run that only the next step stores."""
        start, tokens = run
        if start != first or len(tokens) != end + ahead - first:
            self._fail(
                f"row {row} inputs positions {first}..{end - 1}, its token run has {start}..{start + len(tokens) - 1}"
            )
        if self.known_len[row] > first:
            self._fail(f"row {row}: the device already has tokens from position {first} to {self.known_len[row] - 1}")
        sums = content_sums(tokens, first, int(self.content[row, first]))
        self.token_pool[row, first : end + ahead] = tokens
        self.content[row, first + 1 : end + ahead + 1] = sums
        self.known_len[row] = end + ahead
        self.slot_token[out_loc] = tokens[: end - first]
        self.slot_position[out_loc] = np.arange(first, end)
        self.slot_content[out_loc] = sums[: end - first]
        self.slot_step[out_loc] = step

    def _check_prefixes(self, plan: StepPlan) -> None:
        """After all stores: attention reads each row's own sequence, and decode prefixes are from earlier steps."""
        n, d = plan.num_rows, plan.num_decode
        rows, device = plan.rows[:n].astype(np.int64), plan.device_len[:n].astype(np.int64)
        first = np.zeros(n, dtype=np.int64)
        if not self.full_check:
            first[:d] = np.maximum(device[:d] - 2, 0)
        lengths = device - first
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - device, lengths)
        flat_rows = np.repeat(rows, lengths)
        slots = self._slots(flat_rows, positions)
        good = (slots >= 0) & (self.slot_content[slots] == self.content[flat_rows, positions + 1])
        if not good.all():
            at = int(np.flatnonzero(~good)[0])
            row, position, slot = int(flat_rows[at]), int(positions[at]), int(slots[at])
            held = f"position {self.slot_position[slot]}, token {self.slot_token[slot]}, step {self.slot_step[slot]}"
            self._fail(
                f"row {row} position {position} (token {self.token_pool[row, position]}) reads slot {slot}, "
                + ("which is no page" if slot < 0 else f"which holds another sequence ({held})")
            )
        prefix = np.repeat(np.arange(n) < d, lengths) & (positions < np.repeat(device, lengths) - 1)
        late = prefix & (self.slot_step[slots] >= plan.step_id)
        if late.any():
            at = int(np.flatnonzero(late)[0])
            self._fail(
                f"decode row {flat_rows[at]} reads position {positions[at]} (slot {slots[at]}), stored in this step"
            )

    def _sample(self, plan: StepPlan) -> np.ndarray:
        sample = plan.sample[: plan.num_samples]
        rows, device = plan.rows[sample], plan.device_len[sample]
        contents = self.content[rows, device]
        tokens = self._draw(plan, rows, device, contents)
        self.token_pool[rows, device] = tokens
        self.content[rows, device + 1] = contents + token_words(tokens, device)
        self.known_len[rows] = device + 1
        return tokens

    def _draw(self, plan: StepPlan, rows: np.ndarray, positions: np.ndarray, contents: np.ndarray) -> np.ndarray:
        """int32[n]: the tokens at `positions` of `rows`, after these contents, as far as the plan allows them."""
        tokens = self.model.next_tokens(contents, self.sampling_key[rows])
        for i in np.flatnonzero(positions < self.suppress_until[rows]).tolist():
            row = int(rows[i])
            tokens[i] = self.model.next_token(int(contents[i]), int(self.sampling_key[row]), self.suppressed[row])
        if plan.extras is not None and len(plan.extras.masks):
            self._extras.apply_masks(plan, tokens, contents)
        return tokens
