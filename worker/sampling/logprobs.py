"""Log probabilities over a sharded vocabulary: of given tokens, their ranks, and the likeliest alternatives.

They are of the model's own distribution (vLLM's `raw_logprobs`): log_softmax of the logits before bias, penalties,
temperature and filters. Each rank sends its best N tokens, its maximum and its sum of exp; the full logits stay where
they are.
"""

from __future__ import annotations

import torch

from worker.parallel import TPGroup
from worker.sampling.filters import OrderKeys

SLICE_ELEMENTS = 1 << 23
"""Logits that are worked on at once: their order keys take 8 bytes each."""


def logprob_words(
    logits: torch.Tensor, targets: torch.Tensor, top: int, vocab_start: int, order: OrderKeys, tp: TPGroup
) -> torch.Tensor:
    """int32[n, 2 + 2 * top], the words of a `LogprobBlock`, the same on every rank.

    Args:
        logits: [n, local_vocab] of this rank's shard, any float dtype.
        targets: int32 or int64[n], the tokens to report on.
    """
    rows = slice_rows(logits.shape[1])
    parts = [
        _words(some.float(), wanted.long(), top, vocab_start, order, tp)
        for some, wanted in zip(logits.split(rows), targets.split(rows), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def slice_rows(local_vocab: int) -> int:
    """Rows of logits that are worked on at once; the same on every rank."""
    return max(1, SLICE_ELEMENTS // local_vocab)


def _words(
    logits: torch.Tensor, targets: torch.Tensor, top: int, vocab_start: int, order: OrderKeys, tp: TPGroup
) -> torch.Tensor:
    local_vocab = logits.shape[1]
    ids = torch.arange(vocab_start, vocab_start + local_vocab, dtype=torch.int32, device=logits.device)
    keys = order.encode(logits, ids)
    best = logits.amax(1)
    total = (logits - best[:, None]).exp_().sum(1, dtype=torch.float64).where(best > -torch.inf, 0.0)
    best = best.double()
    column = targets - vocab_start
    here = (column >= 0) & (column < local_vocab)
    lowest = torch.iinfo(torch.int64).min
    target = keys.gather(1, column.clamp(0, local_vocab - 1)[:, None])[:, 0].where(here, lowest)
    likeliest = torch.topk(keys, min(top, local_vocab), dim=1).values if top else keys[:, :0]
    if tp.size > 1:
        own = torch.stack((target, best.view(torch.int64), total.view(torch.int64)), 1)
        shards = tp.all_gather(torch.cat((own, likeliest), 1)[None], 0)  # [tp, n, 3 + N]: one exchange
        target = shards[..., 0].amax(0)
        bests, totals = shards[..., 1:3].contiguous().view(torch.float64).unbind(-1)
        best = bests.amax(0)
        total = (totals * (bests - best).exp()).sum(0)
        listed = shards[..., 3:].transpose(0, 1).flatten(1)
        likeliest = torch.topk(listed, min(top, listed.shape[1]), dim=1).values
    rank = tp.all_reduce((keys > target[:, None]).sum(1)) + 1
    log_total = best + total.log()
    values = torch.cat((order.values(target)[:, None], order.values(likeliest)), 1).double() - log_total[:, None]
    words = values.float().view(torch.int32)
    top_ids = order.ids(likeliest)
    if likeliest.shape[1] < top:  # a tiny vocabulary
        missing = top - likeliest.shape[1]
        top_ids = torch.nn.functional.pad(top_ids, (0, missing), value=-1)
        words = torch.nn.functional.pad(values.float(), (0, missing), value=-torch.inf).view(torch.int32)
    return torch.cat((rank.to(torch.int32)[:, None], words[:, :1], top_ids, words[:, 1:]), 1)
