"""`SamplerGraphs`: what follows a captured forward pass, on the logits that it leaves in a static buffer.

Greedy and temperature-only sampling are graphs too. Steps that need filters, min_tokens, bias, penalties or masks run
those eagerly, and log probabilities are computed from the same logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from worker.graphs.recorder import Recorder
from worker.models.base import CausalLM
from worker.sampling import Sampler, SamplingMode
from worker.token_pool import TokenPool

GREEDY = SamplingMode(noisy=False, num_filtered=0, wide=False, wide_k=False, suppress=False)
NOISY = SamplingMode(noisy=True, num_filtered=0, wide=False, wide_k=False, suppress=False)


class _Pair(NamedTuple):
    greedy: torch.cuda.CUDAGraph
    noisy: torch.cuda.CUDAGraph


class SamplerGraphs:
    """Samplers of fixed numbers of entries. A forward graph writes what they read:

    logits      [largest, local_vocab]
    rows        int64[largest]    table row of each sampled entry; the dummy row where there is none
    positions   int64[largest]    the position its token will have
    """

    def __init__(self, model: CausalLM, sampler: Sampler, token_pool: TokenPool, largest: int) -> None:
        self._sampler, self._token_pool = sampler, token_pool
        device = model.ctx.device
        self.logits = torch.empty(largest, model.lm_head.local_size, dtype=model.ctx.dtype, device=device)
        self.rows, self.positions = torch.zeros(2, largest, dtype=torch.int64, device=device).unbind()
        self._tokens = torch.zeros(largest, dtype=torch.int32, device=device)
        self._captured: dict[int, _Pair] = {}

    def capture(self, size: int, recorder: Recorder) -> None:
        """Capture both samplers of `size` entries, which lie in the static buffers."""
        modes = (GREEDY, NOISY)
        for mode in modes:
            self._sample(size, mode)
        self._captured[size] = _Pair(*(recorder.record(lambda mode=mode: self._sample(size, mode)) for mode in modes))

    def run(self, size: int, num_samples: int, mode: SamplingMode) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample the first `num_samples` of a captured size: int32[size] tokens, and the words of the log probabilities
        that `mode` wants. The tokens are overwritten by the next run on the compute stream."""
        raw = self._sampler.take_raw(self.logits[:num_samples], self.rows[:num_samples], mode)
        if mode.is_plain:
            pair = self._captured[size]
            (pair.noisy if mode.noisy else pair.greedy).replay()
        else:
            self._sample(num_samples, mode)
        tokens = self._tokens[:size]
        return tokens, None if raw is None else self._sampler.sampled_logprobs(raw, tokens)

    def _sample(self, count: int, mode: SamplingMode) -> None:
        rows, positions = self.rows[:count], self.positions[:count]
        tokens = self._sampler.sample(self.logits[:count], rows, positions, mode)
        self._token_pool.scatter(rows, positions, tokens)
        self._tokens[:count].copy_(tokens)
