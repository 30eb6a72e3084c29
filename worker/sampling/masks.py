"""Masks of constrained requests: which ids a step's tokens may be, on this rank's shard of the vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch

from worker.sampling.logprobs import slice_rows

WORD_BITS = 32


class StepMasks(NamedTuple):
    """The masks of one step, on the device: int32[n] numbers of the sampled entries, and int32[n, words] bits by id."""

    samples: torch.Tensor
    words: torch.Tensor


class VocabularyMask:
    """Applies masks to logits of the ids `vocab_start .. vocab_start + local_vocab`."""

    def __init__(self, vocab_start: int, local_vocab: int, device: torch.device) -> None:
        ids = torch.arange(vocab_start, vocab_start + local_vocab, dtype=torch.int32, device=device)
        self._word = (ids // WORD_BITS).long()
        self._bit = ids % WORD_BITS
        self._rows = slice_rows(local_vocab)

    def apply(self, logits: torch.Tensor, masks: StepMasks) -> None:
        """Set the ids that are not allowed to -inf in float32 [S, local_vocab] `logits`. Ids beyond a mask are not."""
        last = masks.words.shape[1] - 1
        word, beyond = self._word.clamp(max=last), self._word > last
        for samples, words in zip(masks.samples.long().split(self._rows), masks.words.split(self._rows), strict=True):
            refused = ((words[:, word] >> self._bit) & 1) == 0
            logits[samples] = logits[samples].masked_fill_(refused | beyond, -torch.inf)
