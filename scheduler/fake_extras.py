"""The fake worker's share of the optional sections: it checks them, and makes up log probabilities.

Penalties and bias change nothing here, since the fake model has no logits. Log probabilities are a function of token
and position, so whoever gets those of another place can tell.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from scheduler.step import LogprobBlock, P, PromptScores, R, S, SampledLogprobs, StepPlan


def has_repeats(values: np.ndarray) -> bool:
    """Whether a number comes twice in an int array [n]. Sorts: hashing, as `np.unique` does, is ten times slower."""
    ordered = np.sort(values)
    return bool((ordered[1:] == ordered[:-1]).any())


def fake_logprobs(tokens: np.ndarray, positions: np.ndarray, top: int) -> LogprobBlock:
    """What the fake worker reports of `tokens` at `positions`: the token itself is the likeliest."""
    words = np.empty((len(tokens), 2 + 2 * top), dtype=np.int32)
    block = LogprobBlock(words)
    logprobs = -((tokens.astype(np.int64) * 31 + positions) % 64 + 1) / 8
    block.ranks[:] = 1
    block.logprobs[:] = logprobs
    block.top_ids[:] = tokens[:, None] + np.arange(top)
    block.top_logprobs[:] = logprobs[:, None] - np.arange(top)
    return block


def draw_allowed(mask: np.ndarray, content: int) -> int:
    """The token that follows a sequence of this content under a mask (int32 words)."""
    allowed = np.flatnonzero(np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little"))
    return int(allowed[content % len(allowed)])


class FakeExtras:
    """Which rows want log probabilities, and the checks of a plan's optional sections.

    Args:
        fail: raises, with the message that it is given.
    """

    def __init__(self, num_rows: int, fail: Callable[[str], None]) -> None:
        self._top = np.full(num_rows, -1, dtype=np.int32)
        self._in_use = False
        self._fail = fail

    def apply(self, plan: StepPlan, token_pool: np.ndarray) -> None:
        """Take over the plan's sections. `token_pool[row, position]` holds every token up to the rows' `device_len`."""
        admitted = plan.sampling[:, S.ROW]
        self._top[admitted] = -1
        extras = plan.extras
        if extras is None:
            return
        self._in_use = True
        if not extras.counts.words:
            self._fail("the flag for optional sections without any")
        for name, rows in (
            ("penalties", extras.penalties[:, P.ROW]),
            ("bias", extras.bias_runs[:, 0]),
            ("log probabilities", extras.logprob_rows[:, 0]),
        ):
            if has_repeats(rows) or not np.isin(rows, admitted).all():
                self._fail(f"{name} for rows {rows.tolist()}, admitted are {admitted.tolist()}")
        self._top[extras.logprob_rows[:, 0]] = extras.logprob_rows[:, 1]
        self._check_history(plan, token_pool)
        self._check_scores(plan, token_pool)

    def apply_masks(self, plan: StepPlan, tokens: np.ndarray, contents: np.ndarray) -> None:
        """Draw the tokens that have a mask anew, from what it allows, by the rows' uint64 `contents`."""
        samples = plan.extras.mask_samples
        if samples[0] < 0 or samples[-1] >= plan.num_samples or (np.diff(samples) <= 0).any():
            self._fail(f"masks for sampled tokens {samples.tolist()}, there are {plan.num_samples}")
        for number, mask in zip(samples.tolist(), plan.extras.masks, strict=True):
            tokens[number] = draw_allowed(mask, int(contents[number]))

    def answer(self, plan: StepPlan, tokens: np.ndarray) -> tuple[SampledLogprobs | None, PromptScores | None]:
        """Log probabilities of the sampled `tokens` and of the prompt tokens that the plan wants scored."""
        if not self._in_use:
            return None, None
        sample = plan.sample[: plan.num_samples]
        tops = self._top[plan.rows[sample]]
        index = np.flatnonzero(tops >= 0).astype(np.int32)
        logprobs = scores = None
        if len(index):
            block = fake_logprobs(tokens[index], plan.device_len[sample][index], int(tops.max()))
            logprobs = SampledLogprobs(index, block)
        if plan.extras is not None and len(plan.extras.score_runs):
            runs = plan.extras.score_runs
            positions = np.concatenate(
                [np.arange(first, first + n) for first, n in runs[:, R.POSITION : R.INPUT].tolist()]
            )
            block = fake_logprobs(plan.extras.score_targets, positions, int(runs[:, R.TOP].max()))
            scores = PromptScores(runs[:, R.ROW : R.INPUT].copy(), block)
        return logprobs, scores

    def _check_history(self, plan: StepPlan, token_pool: np.ndarray) -> None:
        """History is what the row holds, as far as it is computed yet."""
        extras, at = plan.extras, 0
        lengths = dict(zip(plan.rows.tolist(), plan.device_len.tolist(), strict=True))
        penalised = set(extras.penalties[:, P.ROW].tolist())
        for row, first, count in extras.history_runs.tolist():
            if row not in penalised:
                self._fail(f"history for row {row}, which has no penalties or a second run")
            penalised.remove(row)
            held = token_pool[row, first : min(first + count, lengths[row])]
            if (held != extras.history_tokens[at : at + len(held)]).any():
                self._fail(f"history of row {row} from position {first} on is not what the row holds")
            at += count

    def _check_scores(self, plan: StepPlan, token_pool: np.ndarray) -> None:
        """Each scored token is predicted by the input before it, and is what the row holds."""
        n, at = plan.num_rows, 0
        first_inputs = np.cumsum(plan.device_len[:n] - plan.cached_len[:n]) - (
            plan.device_len[:n] - plan.cached_len[:n]
        )
        entries = {row: i for i, row in enumerate(plan.rows[:n].tolist())}
        for row, first, count, first_input, _ in plan.extras.score_runs.tolist():
            entry = entries.get(row, -1)
            start, end = int(plan.cached_len[entry]), int(plan.device_len[entry])
            if (
                entry < 0
                or first_input != first_inputs[entry] + first - 1 - start
                or not start < first <= first + count - 1 <= end
            ):
                self._fail(f"score run {(row, first, count, first_input)} does not fit inputs {start}..{end - 1}")
            held = token_pool[row, first : min(first + count, end)]
            if (held != plan.extras.score_targets[at : at + len(held)]).any():
                self._fail(f"score targets of row {row} from position {first} on are not what the row holds")
            at += count
