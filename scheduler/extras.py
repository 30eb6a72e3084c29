"""Penalties, bias, log probabilities and masks on the scheduler's side: what requests that use them add to a plan, and
what comes back for them. Requests without them never get here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.constraint import StepMasks
from scheduler.outputs import StepOutputs
from scheduler.prefill import Chunk
from scheduler.request import Req, ReqState, Request
from scheduler.row_state import RowState
from scheduler.sampling_params import MIN_REPETITION_PENALTY
from scheduler.step import ExtraCounts, LogprobBlock, PlanExtras, PromptScores, SampledLogprobs

Runs = list[tuple[tuple[int, ...], np.ndarray]]  # (a run's words, its ids)


class ExtraSections:
    """The optional sections of one plan, collected from the chunks of the requests that use them."""

    def __init__(
        self, chunks: Sequence[tuple[Chunk, int]], rows: RowState | None, masks: StepMasks | None = None
    ) -> None:
        """`chunks`: each with the number of its first input token in the step."""
        self._masks = masks
        self._penalties: list[tuple[int, float, float, float, int]] = []
        self._history: Runs = []
        self._bias: list[tuple[int, dict[int, float]]] = []
        self._logprobs: list[tuple[int, int]] = []
        self._scores: Runs = []
        for chunk, first_input in chunks:
            if chunk.first:
                req = chunk.req
                self._admit(req.table_idx, req.request, rows.tokens[req.table_idx, : req.known_len])
            if chunk.req.to_score:
                self._score(chunk, first_input, rows)
        self.counts = self._count()

    @classmethod
    def of_row(cls, row: int, request: Request, tokens: np.ndarray) -> ExtraSections:
        """Those that admit `request` to `row` with these known tokens (int32[n])."""
        sections = cls((), None)
        sections._admit(row, request, tokens)
        sections.counts = sections._count()
        return sections

    def write(self, extras: PlanExtras) -> None:
        """Fill in the sections, which have `counts`."""
        if self._penalties:
            table = np.array(self._penalties, dtype=np.float64)
            extras.penalties[:] = table
            extras.penalties[:, 1:4] = np.ascontiguousarray(table[:, 1:4], dtype=np.float32).view(np.int32)
        _write_runs(self._history, extras.history_runs, extras.history_tokens)
        if self._bias:
            extras.bias_runs[:] = [(row, len(bias)) for row, bias in self._bias]
            extras.bias_ids[:] = [token for _, bias in self._bias for token in bias]
            values = [value for _, bias in self._bias for value in bias.values()]
            extras.bias_values[:] = np.array(values, dtype=np.float32).view(np.int32)
        if self._logprobs:
            extras.logprob_rows[:] = self._logprobs
        _write_runs(self._scores, extras.score_runs, extras.score_targets)
        if self._masks is not None:
            extras.mask_samples[:], extras.masks[:] = self._masks

    def _count(self) -> ExtraCounts:
        return ExtraCounts(
            penalties=len(self._penalties),
            history_runs=len(self._history),
            history_tokens=sum(len(ids) for _, ids in self._history),
            bias_runs=len(self._bias),
            bias_ids=sum(len(bias) for _, bias in self._bias),
            logprob_rows=len(self._logprobs),
            score_runs=len(self._scores),
            score_targets=sum(len(ids) for _, ids in self._scores),
            masks=0 if self._masks is None else len(self._masks.samples),
            mask_words=0 if self._masks is None else self._masks.words.size,
        )

    def _admit(self, row: int, request: Request, known: np.ndarray) -> None:
        """What a request's row needs from its first chunk on."""
        sampling = request.sampling
        if sampling.has_penalties:
            repetition = max(sampling.repetition_penalty, MIN_REPETITION_PENALTY)
            penalties = (sampling.presence_penalty, sampling.frequency_penalty, repetition)
            self._penalties.append((row, *penalties, request.prompt_len))
            # The prompt counts for the repetition penalty only.
            first = 0 if sampling.repetition_penalty != 1 else request.prompt_len
            tokens = known[first:]
            if len(tokens):
                self._history.append(((row, first, len(tokens)), tokens))
        if sampling.logit_bias:
            self._bias.append((row, sampling.logit_bias))
        if sampling.logprobs is not None:
            self._logprobs.append((row, sampling.logprobs))

    def _score(self, chunk: Chunk, first_input: int, rows: RowState) -> None:
        """The prompt tokens that the chunk's inputs predict and nobody has scored yet."""
        req, row = chunk.req, chunk.req.table_idx
        start, end = max(chunk.start, req.scored), min(chunk.end, req.prompt_len - 1)
        if end > start:
            words = (
                row,
                start + 1,
                end - start,
                first_input + start - chunk.start,
                req.request.sampling.prompt_logprobs,
            )
            self._scores.append((words, rows.tokens[row, start + 1 : end + 1]))


def _write_runs(runs: Runs, table: np.ndarray, ids: np.ndarray) -> None:
    if runs:
        table[:] = [words for words, _ in runs]
        np.concatenate([tokens for _, tokens in runs], out=ids)


class PromptScoreKeeper:
    """Collects the log probabilities of prompts, and hands each out whole with its request's next output."""

    def __init__(self) -> None:
        self.complete: list[Req] = []  # scored to their end, and not named by outputs since

    def record(self, scores: PromptScores | None, by_row: list[Req | None], rows: RowState) -> None:
        """Take the scores of a step, before its finishes: its rows still have the requests they had then."""
        self.complete = [req for req in self.complete if req.state is not ReqState.ENDED]
        if scores is None:
            return
        at = 0
        for row, first, count in scores.runs.tolist():
            req = by_row[row]
            if rows.accepts[row] and req is not None and req.to_score and first == req.scored + 1:
                block = LogprobBlock(scores.block.words[at : at + count])
                req.prompt_scores.append(block.narrowed(req.request.sampling.prompt_logprobs))
                req.scored += count
                if not req.to_score:
                    self.complete.append(req)
            at += count

    def deliver(self, outputs: StepOutputs) -> None:
        """Add to `outputs` the prompts of the requests that they name."""
        named = set(outputs.request_ids.tolist())
        waiting = []
        for req in self.complete:
            if req.request_id in named:
                top = req.request.sampling.prompt_logprobs
                outputs.prompt_logprobs[req.request_id] = LogprobBlock.joined(req.prompt_scores, top)
                req.prompt_scores.clear()
            else:
                waiting.append(req)
        self.complete = waiting


def of_wanted(logprobs: SampledLogprobs, wanted: np.ndarray) -> SampledLogprobs:
    """The log probabilities of the tokens that are `wanted` (bool, one per token), numbered among those."""
    kept = wanted[logprobs.index]
    places = np.cumsum(wanted, dtype=np.int32) - 1
    return SampledLogprobs(places[logprobs.index[kept]], LogprobBlock(logprobs.block.words[kept]))
