"""`Sampler`: logits of one step to tokens, with the vocabulary kept sharded.

A token is the arg-max of `logits / T + gumbel(seed, position, id)` (the Gumbel-max trick: distributed as
softmax(logits / T)), so ranks only compare their local winners. Greedy rows add no noise. Every rank computes the same
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from worker.parallel import TPGroup
from worker.sampling.extras import RowExtras, first_where
from worker.sampling.filters import OrderKeys, cut_list, search_threshold
from worker.sampling.logprobs import logprob_words
from worker.sampling.masks import VocabularyMask
from worker.sampling.noise import gumbel, row_keys
from worker.sampling.shard import UNUSABLE, best_of, create_shard_sampler
from worker.sampling.state import SamplingMode, SamplingState

LIST_SIZE = 256
"""Candidates each rank sends for rows with filters. A top_k up to this never needs the threshold search."""


@dataclass(frozen=True, slots=True)
class RawLogits:
    """Logits of the entries that want log probabilities, and how many alternatives they want."""

    chosen: torch.Tensor  # int64[n], ascending, out of the S sampled entries
    logits: torch.Tensor  # [n, local_vocab], a copy
    top: int


class Sampler:
    """Samples from this rank's shard `vocab_start .. vocab_start + local_vocab` of the vocabulary.

    Args:
        vocab_size: ids of the whole vocabulary, padding included (`local_vocab * tp.size`).
    """

    def __init__(
        self, num_rows: int, vocab_size: int, vocab_start: int, tp: TPGroup, device: torch.device,
        list_size: int = LIST_SIZE,
    ) -> None:  # fmt: skip
        extras = RowExtras(num_rows, vocab_start, vocab_size // tp.size, device)
        self.state = SamplingState(num_rows, vocab_size, list_size, device, extras)
        self._tp = tp
        self._list_size = list_size
        self._vocab_size = vocab_size
        self._vocab_start = vocab_start
        self._ids = torch.arange(vocab_start, vocab_start + vocab_size // tp.size, dtype=torch.int32, device=device)
        self._order = OrderKeys(vocab_size)
        self._sample_shard, self._best_shard = create_shard_sampler(device)

    def sample(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, mode: SamplingMode
    ) -> torch.Tensor:
        """Tokens of S sampled entries: int32[S], the same on every rank; `UNUSABLE` where none can be sampled.

        Args:
            logits: [S, local_vocab], any float dtype; -inf where an id does not exist. May be overwritten.
            rows: int64[S], the entries' table rows.
            positions: int64[S], the absolute positions the tokens will have.
            mode: what the rows' parameters need (`SamplingState.mode`).
        """
        if not (mode.is_plain and logits.is_cuda):  # the fused kernel reads any dtype
            logits = logits.float()
        if mode.extras is not None:
            self.state.extras.adjust(logits, rows, mode.extras)
        if mode.masked:
            self._vocabulary_mask.apply(logits, self.state.masks)
        tokens = self._sample(logits, rows, positions, mode)
        if mode.extras is not None:
            self.state.extras.count(rows, tokens, mode.extras)
        return tokens

    def take_raw(self, logits: torch.Tensor, rows: torch.Tensor, mode: SamplingMode) -> RawLogits | None:
        """Set aside the logits of the entries that want log probabilities, before `sample` overwrites them; arguments
        as there. None if no entry does."""
        if mode.extras is None or not len(mode.extras.logprob_index):
            return None
        chosen = first_where(self.state.extras.wants_logprobs[rows], len(mode.extras.logprob_index))
        return RawLogits(chosen, logits[chosen], mode.extras.top)

    def sampled_logprobs(self, raw: RawLogits, tokens: torch.Tensor) -> torch.Tensor:
        """`logprobs` of the entries of `raw`, which got int32[S] `tokens`."""
        return self.logprobs(raw.logits, tokens[raw.chosen], raw.top)

    def logprobs(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> torch.Tensor:
        """Words of the targets' log probabilities, see `logprob_words`: int32[n, 2 + 2 * top]."""
        return logprob_words(logits, targets, top, self._vocab_start, self._order, self._tp)

    @cached_property
    def _vocabulary_mask(self) -> VocabularyMask:
        return VocabularyMask(self._vocab_start, len(self._ids), self._ids.device)

    def _sample(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, mode: SamplingMode
    ) -> torch.Tensor:
        state = self.state
        if mode.suppress:
            self._suppress(logits, rows, positions)
        if mode.num_filtered == len(rows):
            return self._filtered(logits, rows, positions, mode)
        tokens = self._agree(
            *self._sample_shard(
                logits, self._vocab_start, rows, positions, state.scale, state.noise, state.seed_key, mode.noisy
            )
        )
        if mode.num_filtered:
            chosen = torch.argsort(state.filtered[rows].int(), descending=True, stable=True)[: mode.num_filtered]
            tokens[chosen] = self._filtered(logits[chosen], rows[chosen], positions[chosen], mode)
        return tokens

    def _suppress(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Set the suppressed ids of rows below their min_tokens to -inf. amin, since unused places share a column."""
        column = self.state.suppress_ids[rows].long() - self._vocab_start
        active = (self.state.suppress_until[rows] > positions)[:, None]
        active = active & (column >= 0) & (column < logits.shape[1]) & (self.state.suppress_ids[rows] >= 0)
        value = torch.where(active, -torch.inf, torch.inf)
        logits.scatter_reduce_(1, column.clamp(0, logits.shape[1] - 1), value, "amin")

    def _agree(self, scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The best of the shards' best, the lowest id among equals: int32[S]."""
        if self._tp.size == 1:
            return tokens
        own = torch.stack((scores.view(torch.int32), tokens))
        return self._best_shard(self._tp.all_gather(own[None], 0))

    def _filtered(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, mode: SamplingMode
    ) -> torch.Tensor:
        """Tokens of rows with filters. On CPU the few rows whose cut lies beyond the list are searched alone; on CUDA,
        where asking would stall the stream, a step that may contain one searches for all of them."""
        state, order, tp = self.state, self._order, self._tp
        scaled = logits.mul_(state.scale[rows, None])
        k0, k1 = row_keys(state.seed_key[rows], positions)
        top_k, top_p, min_p = state.top_k[rows], state.top_p[rows], state.min_p[rows]
        keys = order.encode(scaled, self._ids)
        cut = cut_list(keys, scaled, top_k, top_p, min_p, self._list_size, self._vocab_size, order, tp)
        ids = order.ids(cut.keys)
        scores = order.values(cut.keys) + gumbel(k0[:, None], k1[:, None], ids)
        winner = scores.masked_fill_(~cut.keep, -torch.inf).argmax(1, keepdim=True)
        tokens = ids.gather(1, winner)[:, 0].masked_fill_(~cut.best.isfinite(), UNUSABLE)
        if not mode.wide:
            return tokens
        if scaled.device.type == "cpu":
            chosen = (~cut.complete).nonzero()[:, 0]
            if not len(chosen):
                return tokens
            keys, scaled, cut = keys[chosen], scaled[chosen], cut.take(chosen)
            top_k, top_p, min_p, k0, k1 = (t[chosen] for t in (top_k, top_p, min_p, k0, k1))
        else:
            chosen = slice(None)
        threshold = search_threshold(keys, scaled, cut, top_k, top_p, min_p, mode.wide_k, order, tp)
        noise = gumbel(k0[:, None], k1[:, None], self._ids)
        scores = noise.add_(scaled).masked_fill_(keys < threshold[:, None], -torch.inf)
        searched = self._agree(*best_of(scores, self._vocab_start))
        tokens[chosen] = torch.where(cut.complete, tokens[chosen], searched)
        return tokens
