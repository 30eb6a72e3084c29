"""Bias, penalties and who wants log probabilities, per table row.

Nothing is allocated, and no step does anything for it, until a request uses one of them. The logits get, in vLLM's
order: bias, repetition penalty (divides positive, multiplies negative logits of tokens in the prompt or generated),
then frequency penalty times count and presence penalty of generated tokens. Temperature and filters come after.

What a row has generated is counted on the device: its history at admission, then every token as it is sampled, on the
compute stream. So step k + 1 sees the token of step k whatever the overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from scheduler.step import P, PlanExtras

INITIAL_ROWS = 8
INITIAL_BIAS_WIDTH = 16
IN_PROMPT, GENERATED = 1, 2
"""A count is GENERATED times how often the token was generated, plus IN_PROMPT if the prompt has it."""


@dataclass(frozen=True, slots=True)
class ExtrasMode:
    """What the sampled entries of a step use, known on the host.

    num_penalised    entries with penalties
    biased           some entry has a bias
    logprob_index    int32[n], ascending: entries that want log probabilities
    top              alternatives that they want, the most of any
    """

    num_penalised: int
    biased: bool
    logprob_index: np.ndarray
    top: int

    @property
    def changes_logits(self) -> bool:
        return self.biased or self.num_penalised > 0


class RowExtras:
    """State of `num_rows` rows for this rank's shard of the vocabulary. Both halves, host and device, are filled from
    the same plan.

    Device tensors by row: `penalised`, `wants_logprobs` bool; `penalties` float32[.., 3] (presence, frequency,
    repetition), `prompt_len` int64, `counts` int32[rows so far, local_vocab + 1] (4 bytes times the vocabulary for each
    row up to the highest that ever had penalties; the last column takes other shards' tokens), `bias_ids` int32 and
    `bias` float32[.., width] (id -1 in unused places).
    """

    def __init__(self, num_rows: int, vocab_start: int, local_vocab: int, device: torch.device) -> None:
        self._num_rows = num_rows + 1
        self._vocab_start, self._local_vocab, self._device = vocab_start, local_vocab, device
        self._in_use = False  # whether any row ever had something here
        self._host_any = np.zeros(self._num_rows, dtype=bool)
        self._host_penalised = np.zeros(self._num_rows, dtype=bool)
        self._host_biased = np.zeros(self._num_rows, dtype=bool)
        self._host_top = np.full(self._num_rows, -1, dtype=np.int32)

    def _allocate(self) -> None:
        n, device = self._num_rows, self._device
        self.penalised = torch.zeros(n, dtype=torch.bool, device=device)
        self.wants_logprobs = torch.zeros(n, dtype=torch.bool, device=device)
        self.penalties = torch.zeros(n, 3, dtype=torch.float32, device=device)
        self.prompt_len = torch.zeros(n, dtype=torch.int64, device=device)
        self.counts = torch.zeros(0, self._local_vocab + 1, dtype=torch.int32, device=device)
        self.bias_ids = torch.full((n, INITIAL_BIAS_WIDTH), -1, dtype=torch.int32, device=device)
        self.bias = torch.zeros(n, INITIAL_BIAS_WIDTH, dtype=torch.float32, device=device)
        self._in_use = True

    def mode(self, rows: np.ndarray) -> ExtrasMode | None:
        """What a step that samples `rows` (on the host) needs; None if nothing."""
        if not self._in_use or not self._host_any[rows].any():
            return None
        tops = self._host_top[rows]
        return ExtrasMode(
            num_penalised=int(np.count_nonzero(self._host_penalised[rows])),
            biased=bool(self._host_biased[rows].any()),
            logprob_index=np.flatnonzero(tops >= 0).astype(np.int32),
            top=int(tops.max()),
        )

    def admit(self, host_rows: np.ndarray, rows: torch.Tensor) -> None:
        """Rows have new owners: forget the old ones. `rows` is the same, int64 on the device."""
        if self._in_use and self._host_any[host_rows].any():
            for flags in (self._host_any, self._host_penalised, self._host_biased):
                flags[host_rows] = False
            self._host_top[host_rows] = -1
            # Setting items to a number would wait for the device.
            self.penalised.index_fill_(0, rows, False)
            self.wants_logprobs.index_fill_(0, rows, False)
            self.bias_ids.index_fill_(0, rows, -1)

    def apply(self, host: PlanExtras, device: PlanExtras) -> None:
        """Take over a plan's sections about rows; the second are the same ones on the device."""
        if not self._in_use:
            self._allocate()
        if len(host.penalties):
            self._apply_penalties(host.penalties[:, P.ROW], device)
        if len(host.bias_runs):
            rows = host.bias_runs[:, 0]
            self._host_any[rows] = self._host_biased[rows] = True
            self._apply_bias(device, int(host.bias_runs[:, 1].max()))
        if len(host.logprob_rows):
            rows = host.logprob_rows[:, 0]
            self._host_any[rows] = True
            self._host_top[rows] = host.logprob_rows[:, 1]
            self.wants_logprobs.index_fill_(0, device.logprob_rows[:, 0].long(), True)

    def adjust(self, logits: torch.Tensor, rows: torch.Tensor, mode: ExtrasMode) -> None:
        """Bias and penalties on float32 [S, local_vocab] `logits` of int64[S] `rows`, in place."""
        if mode.biased:
            ids = self.bias_ids[rows]
            column = ids.long() - self._vocab_start
            here = (ids >= 0) & (column >= 0) & (column < self._local_vocab)
            value = torch.where(here, self.bias[rows], 0.0)
            logits.scatter_add_(1, column.clamp_(0, self._local_vocab - 1), value)
        if mode.num_penalised:
            chosen = first_where(self.penalised[rows], mode.num_penalised)
            at = rows[chosen]
            presence, frequency, repetition = self.penalties[at].unsqueeze(-1).unbind(1)
            counts = self.counts[at, : self._local_vocab]
            part = logits[chosen]
            repeated = torch.where(part > 0, part / repetition, part * repetition)
            part = torch.where(counts > 0, repeated, part)
            generated = counts >> 1
            part -= frequency * generated
            part -= presence * (generated > 0)
            logits[chosen] = part

    def count(self, rows: torch.Tensor, tokens: torch.Tensor, mode: ExtrasMode) -> None:
        """Count the tokens (int32[S]) that were sampled for `rows`."""
        if mode.num_penalised:
            chosen = first_where(self.penalised[rows], mode.num_penalised)
            self.counts[rows[chosen], self._columns(tokens[chosen])] += GENERATED  # rows differ: no two at one place

    def _columns(self, tokens: torch.Tensor) -> torch.Tensor:
        column = tokens.long() - self._vocab_start
        return torch.where((column >= 0) & (column < self._local_vocab), column, self._local_vocab)

    def _apply_penalties(self, host_rows: np.ndarray, device: PlanExtras) -> None:
        self._host_any[host_rows] = self._host_penalised[host_rows] = True
        self._reserve(int(host_rows.max()) + 1)
        entries = device.penalties
        rows = entries[:, P.ROW].long()
        self.penalised.index_fill_(0, rows, True)
        self.penalties[rows] = entries[:, P.PRESENCE : P.REPETITION + 1].contiguous().view(torch.float32)
        self.prompt_len[rows] = entries[:, P.PROMPT_LEN].long()
        self.counts.index_fill_(0, rows, 0)
        if not len(device.history_tokens):
            return
        row, position = expand_runs(device.history_runs, len(device.history_tokens))
        column, nowhere = self._columns(device.history_tokens), self._local_vocab
        generated = position >= self.prompt_len[row]
        self.counts[row, torch.where(generated, nowhere, column)] = self.counts.new_full((), IN_PROMPT)
        one = torch.full_like(device.history_tokens, GENERATED)
        self.counts.index_put_((row, torch.where(generated, column, nowhere)), one, accumulate=True)

    def _reserve(self, rows: int) -> None:
        held = len(self.counts)
        if rows > held:
            more = min(max(rows, 2 * held, INITIAL_ROWS), self._num_rows) - held
            self.counts = torch.cat((self.counts, self.counts.new_zeros(more, self.counts.shape[1])))

    def _apply_bias(self, device: PlanExtras, longest: int) -> None:
        width = self.bias.shape[1]
        if longest > width:
            more = max(longest, 2 * width) - width
            self.bias_ids = torch.nn.functional.pad(self.bias_ids, (0, more), value=-1)
            self.bias = torch.nn.functional.pad(self.bias, (0, more))
        rows, count = device.bias_runs.long().unbind(1)
        runs = torch.stack((rows, torch.zeros_like(rows), count), 1)
        row, column = expand_runs(runs, len(device.bias_ids))
        self.bias_ids.index_fill_(0, rows, -1)
        self.bias_ids[row, column] = device.bias_ids
        self.bias[row, column] = device.bias_values.view(torch.float32)


def first_where(flags: torch.Tensor, count: int) -> torch.Tensor:
    """int64[count]: indices of the first so many True of bool[S] `flags`, ascending, with no wait for the device."""
    return torch.argsort(flags.int(), descending=True, stable=True)[:count]


def expand_runs(runs: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, position) of every token of int32[n, 3] `runs` of (row, first position, count): two int64[total]."""
    row, first, count = runs.long().unbind(1)
    run = torch.repeat_interleave(torch.arange(len(runs), device=runs.device), count, output_size=total)
    offset = torch.arange(total, device=runs.device) - (count.cumsum(0) - count)[run]
    return row[run], first[run] + offset
