"""top-k, top-p and min-p over a sharded vocabulary, without gathering or sorting it.

The order of Hugging Face's and vLLM's samplers: temperature, then top-k, then top-p over the renormalised top-k
distribution, then min-p relative to the largest probability. At least one token always stays. Equal values are cut in
id order (lower ids stay), so exactly `top_k` tokens pass top-k.

Tokens are compared by *order keys*: one int64 that sorts by (value descending, id ascending) when taken from the
largest down. A filter's outcome is one key per row, the *threshold*: tokens with key >= threshold stay.

1. Each rank sends its best M keys and its shard's sum of exp (relative to its own maximum). Every rank merges them into
   the same list of the best M overall and cuts that (`cut_list`). With 0 < top_k <= M this is always the whole answer.
2. Where the cut lies beyond the list (`CutList.complete` is false), `search_threshold` finds the threshold key digit by
   digit from histograms of counts and masses summed over the ranks: a fixed number of rounds, with no branch on what
   is found, so ranks stay in step and nothing waits for the device.

Masses are summed in float64: the cut must not depend on how the vocabulary was split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.parallel import TPGroup

RADIX_BITS = 8
RADIX = 1 << RADIX_BITS


class OrderKeys:
    """Converts (float32 value, id < vocab_size) to int64 order keys and back.

    Keys plus `bias` lie in 0 .. 2 ** (RADIX_BITS * rounds) - 1.
    """

    def __init__(self, vocab_size: int) -> None:
        self.id_bits = max(1, (vocab_size - 1).bit_length())
        self._id_mask = (1 << self.id_bits) - 1
        self.bias = 1 << (31 + self.id_bits)
        self.rounds = -(-(32 + self.id_bits) // RADIX_BITS)

    def encode(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (_sortable(values).long() << self.id_bits) | (self._id_mask - ids.long())

    def floor(self, values: torch.Tensor) -> torch.Tensor:
        """The smallest key any token of this value can have."""
        return _sortable(values).long() << self.id_bits

    def values(self, keys: torch.Tensor) -> torch.Tensor:
        word = (keys >> self.id_bits).to(torch.int32)
        return (word ^ ((word >> 31) & 0x7FFFFFFF)).view(torch.float32)

    def ids(self, keys: torch.Tensor) -> torch.Tensor:
        return (self._id_mask - (keys & self._id_mask)).to(torch.int32)


def _sortable(values: torch.Tensor) -> torch.Tensor:
    """float32 to int32 of the same order; +0.0 merges the two zeros."""
    bits = (values + 0.0).contiguous().view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@dataclass(slots=True)
class CutList:
    """The merged candidate list of F rows after the cut, the same on every rank.

    keys       [F, L] int64, largest first
    keep       [F, L] bool: passes every filter, as far as the list tells
    complete   [F] bool: no token beyond the list passes
    best       [F] float32: the row's largest value
    """

    keys: torch.Tensor
    keep: torch.Tensor
    complete: torch.Tensor
    best: torch.Tensor

    def take(self, rows: torch.Tensor) -> CutList:
        """The list of some of the rows."""
        return CutList(self.keys[rows], self.keep[rows], self.complete[rows], self.best[rows])


def cut_list(
    keys: torch.Tensor, values: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
    list_size: int, vocab_size: int, order: OrderKeys, tp: TPGroup,
) -> CutList:  # fmt: skip
    """Exchange the best `list_size` tokens of each shard and cut the merged list.

    Args:
        keys, values: this rank's shard, [F, local_vocab]: order keys and temperature-scaled logits.
        top_k: [F] int64, `vocab_size` where off. top_p: [F] float32, 1 where off. min_p: [F] float32, 0 where off.
    """
    local_best = values.amax(1, keepdim=True)
    local_sum = (values - local_best).exp_().sum(1, dtype=torch.float64).where(local_best[:, 0] > -torch.inf, 0.0)
    top = torch.topk(keys, min(list_size, keys.shape[1]), dim=1).values
    best, total = local_best[:, 0].double(), local_sum
    if tp.size > 1:
        packed = torch.cat((top, torch.stack((best, total), 1).view(torch.int64)), 1)
        shards = tp.all_gather(packed[None], 0)  # [tp, F, M + 2]: one exchange
        bests, sums = shards[..., -2:].contiguous().view(torch.float64).unbind(-1)
        best = bests.amax(0)
        total = (sums * (bests - best).exp()).sum(0)
        listed = shards[..., :-2].transpose(0, 1).flatten(1)
        top = torch.topk(listed, min(list_size, listed.shape[1]), dim=1).values
    best = best.float()

    size = top.shape[1]
    listed = order.values(top)
    mass = (listed - best[:, None]).exp_().double()
    in_k = torch.arange(size, device=top.device) < top_k[:, None]
    k_known = (top_k <= size) | (top_k >= vocab_size)
    k_mass = torch.where(top_k <= size, torch.where(in_k, mass, 0.0).sum(1), total)
    target = torch.where(top_p < 1, top_p * k_mass, torch.inf)
    below = mass.cumsum(1) - mass
    keep = in_k & (below < target[:, None]) & (listed >= (best + min_p.log())[:, None])
    keep[:, 0] = True
    complete = (~keep[:, -1] | (top_k <= size)) & (k_known | (top_p >= 1))
    if size >= vocab_size:
        complete = torch.ones_like(complete)
    return CutList(top, keep, complete, best)


def search_threshold(
    keys: torch.Tensor, values: torch.Tensor, cut: CutList, top_k: torch.Tensor, top_p: torch.Tensor,
    min_p: torch.Tensor, wide_k: bool, order: OrderKeys, tp: TPGroup,
) -> torch.Tensor:  # fmt: skip
    """The threshold key of each row, int64[F], by radix selection over the whole sharded vocabulary.

    Arguments as in `cut_list`, with its result for the same rows; `wide_k` says whether some row's top_k lies beyond
    the list (and within the vocabulary). A select is a fixed number of rounds; each sums one histogram over the ranks.
    """
    lowest = order.floor(torch.full_like(cut.best, -torch.inf))
    if wide_k:
        count_cut = _select(keys, torch.ones_like(keys), top_k, order, tp)
    else:
        last = cut.keys.gather(1, (top_k - 1).clamp(max=cut.keys.shape[1] - 1)[:, None])[:, 0]
        count_cut = torch.where(top_k <= cut.keys.shape[1], last, lowest)
    mass = (values - cut.best[:, None]).exp_().double().masked_fill_(keys < count_cut[:, None], 0.0)
    target = torch.where(top_p < 1, top_p * tp.all_reduce(mass.sum(1)), torch.inf)
    mass_cut = _select(keys, mass, target, order, tp)
    share_cut = order.floor(cut.best + min_p.log())
    return torch.minimum(torch.stack((count_cut, mass_cut, share_cut)).amax(0), cut.keys[:, 0])


def _select(
    keys: torch.Tensor, weights: torch.Tensor, target: torch.Tensor, order: OrderKeys, tp: TPGroup
) -> torch.Tensor:
    """The largest key whose tokens from there up weigh at least `target`, int64[F]; below all keys if none do.

    Finds `RADIX_BITS` of the key a round, from the top, with a histogram of the tokens that share the bits found.
    """
    keys = keys + order.bias
    prefix = torch.zeros(len(keys), dtype=torch.int64, device=keys.device)
    above = torch.zeros(len(keys), dtype=weights.dtype, device=keys.device)
    for shift in range((order.rounds - 1) * RADIX_BITS, -1, -RADIX_BITS):
        shifted = keys >> shift
        digit = shifted & (RADIX - 1)
        matching = (shifted >> RADIX_BITS) == prefix[:, None]
        histogram = torch.zeros(len(keys), RADIX, dtype=weights.dtype, device=keys.device)
        tp.all_reduce(histogram.scatter_add_(1, digit, weights * matching))
        from_digit = above[:, None] + histogram.flip(1).cumsum(1).flip(1)
        chosen = ((from_digit >= target[:, None]).sum(1) - 1).clamp(min=0)[:, None]
        above = (from_digit - histogram).gather(1, chosen)[:, 0]
        prefix = (prefix << RADIX_BITS) | chosen[:, 0]
    return prefix - order.bias
