"""Writes a step's entries into a plan buffer."""

from __future__ import annotations

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.constraint import StepMasks
from scheduler.decode import DecodeBatch, DecodeEntries
from scheduler.extras import ExtraSections
from scheduler.prefill import Chunk
from scheduler.request import Req
from scheduler.row_state import RowState
from scheduler.step import S, StepPlan, StepPlanWriter

NO_ROWS = np.empty(0, dtype=np.int64)


class PlanBuilder:
    """Turns decode entries and prefill chunks into a sealed `StepPlan`."""

    def __init__(self, config: SchedulerConfig, rows: RowState) -> None:
        # One buffer more than the plans whose memory callers may still read.
        self._writer = StepPlanWriter(config.overlap_depth + 3)
        self._rows = rows
        self._page_positions = np.arange(config.pages_per_row, dtype=np.int32) * config.page_size
        self._pad_sizes = np.array(sorted(config.pad_sizes), dtype=np.int64)
        self._dummy_row = config.max_running_requests
        self._dummy_slot = config.num_pages * config.page_size
        self._identity = np.arange(config.max_running_requests + int(self._pad_sizes[-1:].sum()) + 1, dtype=np.int32)

    def build(
        self, step_id: int, decode: DecodeBatch, entries: DecodeEntries, chunks: list[Chunk], masks: StepMasks | None
    ) -> tuple[StepPlan, np.ndarray]:
        """The plan, and the decode rows whose last token it computes. Advances the decode rows."""
        decodes = len(entries.rows)
        num_rows, crossing = decodes + len(chunks), len(entries.crossing)
        padded_rows = num_rows if chunks else self._padded(num_rows)
        samples = tokens = decodes
        news, counts, used = 0, {}, []
        if chunks:
            sampled, admitted = [], []
            for i, chunk in enumerate(chunks, decodes):
                if chunk.req.has_extras:
                    used.append((chunk, tokens))
                tokens += chunk.end - chunk.start
                news += chunk.page_to - chunk.page_from
                if chunk.samples:
                    sampled.append(i)
                if chunk.first:
                    admitted.append(chunk.req)
            samples += len(sampled)
            suppressed = [req for req in admitted if req.suppress_until]
            counts = {
                "token_runs": len(chunks), "run_tokens": tokens - decodes, "sampling": len(admitted),
                "suppress_runs": len(suppressed), "suppress_ids": sum([len(req.stop_ids) for req in suppressed]),
            }  # fmt: skip
        if used or masks is not None:
            extras = ExtraSections(used, self._rows, masks)
            if extras.counts.words:
                counts["extras"] = extras.counts
        plan = self._writer.begin(
            step_id=step_id, num_rows=num_rows, num_decode=decodes, num_samples=samples, num_tokens=tokens,
            padded_rows=padded_rows, padded_tokens=tokens + padded_rows - num_rows,
            page_deltas=crossing + news, **counts,
        )  # fmt: skip
        finished = NO_ROWS
        if decodes:
            plan.rows[:decodes] = entries.rows
            plan.cached_len[:decodes] = entries.cached_len
            finished = decode.advance(entries, plan.out_loc[:decodes], plan.device_len[:decodes])
            if crossing:
                deltas = plan.page_deltas[:crossing]
                deltas[:, 0] = entries.rows[entries.crossing]
                deltas[:, 1] = entries.cached_len[entries.crossing]
                deltas[:, 2] = entries.pages
        plan.sample[:] = self._identity[:padded_rows]
        if chunks:
            if sampled:
                plan.sample[decodes:samples] = sampled
            self._write_chunks(plan, chunks, decodes, crossing)
            self._write_admissions(plan, admitted, suppressed)
        if plan.extras is not None:
            extras.write(plan.extras)
        if padded_rows > num_rows:
            plan.rows[num_rows:] = self._dummy_row
            plan.cached_len[num_rows:] = 0
            plan.device_len[num_rows:] = 1
            plan.out_loc[tokens:] = self._dummy_slot
        return plan.seal(), finished

    def _padded(self, num_rows: int) -> int:
        if not len(self._pad_sizes) or num_rows > self._pad_sizes[-1]:
            return num_rows
        return int(self._pad_sizes[np.searchsorted(self._pad_sizes, num_rows)])

    def _write_chunks(self, plan: StepPlan, chunks: list[Chunk], decodes: int, page: int) -> None:
        """Prefill entries and what goes with them. `page`: the first page delta that is theirs."""
        rows, token = self._rows, 0
        out_loc, run_tokens, deltas = plan.out_loc[decodes:], plan.run_tokens, plan.page_deltas
        for i, chunk in enumerate(chunks):
            row, start, end = chunk.req.table_idx, chunk.start, chunk.end
            plan.rows[decodes + i] = row
            plan.cached_len[decodes + i] = start
            plan.device_len[decodes + i] = end
            plan.token_runs[i] = row, start, end - start
            to = token + end - start
            rows.write_slots(row, start, end, out_loc[token:to])
            run_tokens[token:to] = rows.tokens[row, start:end]
            token = to
            news = slice(chunk.page_from, chunk.page_to)
            if news.stop > news.start:
                to = page + news.stop - news.start
                deltas[page:to, 0] = row
                deltas[page:to, 1] = self._page_positions[news]
                deltas[page:to, 2] = rows.page_table[row, news]
                page = to

    def _write_admissions(self, plan: StepPlan, admitted: list[Req], suppressed: list[Req]) -> None:
        if admitted:
            entries = b"".join([req.sampling_words for req in admitted])
            plan.sampling[:] = np.frombuffer(entries, dtype="<i4").reshape(plan.sampling.shape)
            plan.sampling[:, S.ROW] = [req.table_idx for req in admitted]
        if suppressed:
            plan.suppress_runs[:] = [(req.table_idx, req.suppress_until, len(req.stop_ids)) for req in suppressed]
            np.concatenate([np.array(req.stop_ids, dtype=np.int32) for req in suppressed], out=plan.suppress_ids)
