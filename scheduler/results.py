"""What a step's sampled tokens mean: known tokens, finishes, outputs. Arrays; only finishing requests are visited."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scheduler.decode import DecodeBatch
from scheduler.extras import of_wanted
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.request import ReqState
from scheduler.request_table import RequestTable
from scheduler.row_state import RowState
from scheduler.step import LogprobBlock, SampledLogprobs, StepPlan, StepResult

NO_TOKEN = (
    "the model's scores for the next token are NaN or infinite, or allow no token: its weights are damaged, or its "
    "numbers outgrow this dtype (try --dtype float32)"
)


class InFlight(NamedTuple):
    """What is needed to apply a plan's result. The arrays may be views of the plan."""

    step_id: int
    rows: np.ndarray  # rows sampled, in the order of the result's tokens
    positions: np.ndarray  # the sampled tokens' positions
    unsampled: list[int]  # rows that end with this step without a token (max_tokens 0)
    dropped: bool = False  # its result means nothing any more

    @classmethod
    def of_plan(cls, step_id: int, plan: StepPlan, unsampled: list[int]) -> InFlight:
        if not plan.num_samples:
            rows, positions = plan.rows[:0], plan.device_len[:0]
        elif plan.num_samples == plan.num_rows:
            rows, positions = plan.rows[: plan.num_rows], plan.device_len[: plan.num_rows]
        else:
            sampled = plan.sample[: plan.num_samples]
            rows, positions = plan.rows[sampled], plan.device_len[sampled]
        return cls(step_id, rows, positions, unsampled)


def apply_result(
    step: InFlight, result: StepResult, state: RowState, table: RequestTable, decode: DecodeBatch
) -> StepOutputs:
    """Record the tokens (one per `step.rows`) of rows that still want them, and end requests that are over."""
    if not len(step.rows):
        outputs = StepOutputs.of_finished([], step_id=step.step_id)
        return outputs.extended(_finish_unsampled(step.unsampled, table)) if step.unsampled else outputs
    rows, positions, tokens = step.rows.astype(np.int64), step.positions, result.tokens
    wanted = state.accepts[rows]
    if not wanted.all():  # R6, R7: tokens of requests that are over are dropped
        rows, positions, tokens = rows[wanted], positions[wanted], tokens[wanted]
    state.flat_tokens[state.token_base[rows] + positions] = tokens
    lengths = positions + 1
    state.known_len[rows] = lengths
    finish = np.zeros(len(rows), dtype=np.uint8)
    outputs = StepOutputs(state.request_id[rows], tokens.copy(), finish, state.cached_prompt[rows], step.step_id)
    stopped = state.stop_ids[0][rows] == tokens
    for column in state.stop_ids[1:]:
        stopped |= column[rows] == tokens
    unusable = tokens < 0
    over = stopped | unusable | (lengths >= state.end_len[rows])
    if over.any():
        at = np.flatnonzero(over)
        columns = rows[at].tolist(), positions[at].tolist(), stopped[at].tolist(), unusable[at].tolist()
        finish[at] = _finish(*columns, state, table, decode)
    if result.logprobs is not None:
        outputs.logprobs = of_wanted(result.logprobs, wanted)
    if unusable.any():
        outputs.errors = dict.fromkeys(outputs.request_ids[unusable].tolist(), NO_TOKEN)
        if outputs.logprobs is not None:
            index, block = outputs.logprobs
            usable = ~unusable[index]
            outputs.logprobs = SampledLogprobs(index[usable], LogprobBlock(block.words[usable]))
    if step.unsampled:
        outputs = outputs.extended(_finish_unsampled(step.unsampled, table))
    return outputs


def _finish(
    rows: list[int],
    positions: list[int],
    stopped: list[bool],
    unusable: list[bool],
    state: RowState,
    table: RequestTable,
    decode: DecodeBatch,
) -> list[FinishReason]:
    """End the requests whose token at `positions` is their last; NONE for a stop token that came too early."""
    reasons, ended = [], []
    for row, position, stops, bad in zip(rows, positions, stopped, unusable, strict=True):
        req = table.by_row[row]
        if bad:
            reason = FinishReason.ERROR
            req.spoilt = True
            state.known_len[row] = position
        elif stops and position >= req.stop_from:
            reason = FinishReason.STOP
            state.known_len[row] = position  # the stop token's K/V, if any, comes from a wasted step
        elif position + 1 >= req.end_len:
            reason = FinishReason.LENGTH
        else:
            reason = FinishReason.NONE
        reasons.append(reason)
        if reason:
            table.close(req)
            ended.append(row)
    decode.remove(ended)
    return reasons


def _finish_unsampled(rows: list[int], table: RequestTable) -> StepOutputs:
    """Requests that wanted no token, and were not aborted meanwhile."""
    entries = []
    for row in rows:
        req = table.by_row[row]
        if req.state is ReqState.LAST:
            entries.append((req.request_id, FinishReason.LENGTH, req.cached_prompt))
            table.close(req)
    return StepOutputs.of_finished(entries)
