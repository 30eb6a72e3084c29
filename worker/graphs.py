"""Decode steps as captured CUDA graphs: one forward graph per batch size, and two small samplers behind it.

A decode-only plan is padded by the scheduler to one of the captured sizes; padding entries name the dummy row and the
dummy page. The plan's hot part is copied, on the compute stream, into one static buffer where every graph reads rows,
lengths and slots from, so plan k + 1 cannot overwrite what graph k reads. All graphs share one memory pool (only one
runs at a time) and are captured largest first, so the pool is as large as the largest needs.

Greedy and temperature-only sampling run as graphs too. Steps that need filters, min_tokens, bias, penalties or masks
run those eagerly, on the logits that the forward graph left in the static buffer, and log probabilities are computed
from those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from scheduler.step import StepPlan
from worker.device import Device
from worker.models.base import CausalLM
from worker.sampling import Sampler, SamplingMode
from worker.step_input import StepInput, hot_views, hot_words
from worker.token_pool import TokenPool

GREEDY = SamplingMode(noisy=False, num_filtered=0, wide=False, wide_k=False, suppress=False)
NOISY = SamplingMode(noisy=True, num_filtered=0, wide=False, wide_k=False, suppress=False)


def decode_graph_sizes(max_running_requests: int, largest: int = 512) -> tuple[int, ...]:
    """Batch sizes worth a graph, ascending: dense where a step is short, every 8 or 16 beyond, the maximum itself."""
    most = min(max_running_requests, largest)
    sizes = {1, 2, 4, *range(8, min(most, 256) + 1, 8), *range(256, most + 1, 16), most}
    return tuple(sorted(size for size in sizes if size <= most))


@dataclass(slots=True)
class _Captured:
    forward: torch.cuda.CUDAGraph
    greedy: torch.cuda.CUDAGraph
    noisy: torch.cuda.CUDAGraph


class DecodeGraphs:
    """Captures and replays decode steps of fixed batch sizes. CUDA only.

    Args:
        max_seq_len: the largest `device_len` a graph must handle.
    """

    def __init__(
        self, model: CausalLM, step_input: StepInput, sampler: Sampler,
        token_pool: TokenPool, device: Device, sizes: tuple[int, ...], max_seq_len: int,
    ) -> None:  # fmt: skip
        self.sizes = sizes
        self._model, self._input = model, step_input
        self._sampler, self._token_pool, self._device = sampler, token_pool, device
        self._max_seq_len = max_seq_len
        largest = max(sizes)
        self._buffer = torch.zeros(hot_words(largest, largest), dtype=torch.int32, device=device.torch_device)
        self._tokens = torch.zeros(largest, dtype=torch.int32, device=device.torch_device)
        self._logits = torch.empty(largest, model.lm_head.local_size, dtype=model.ctx.dtype, device=device.torch_device)
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, _Captured] = {}

    def capture(self, dummy_row: int, dummy_slot: int, progress: Callable[[str, float], None]) -> None:
        """Capture every size, largest first. The static buffer holds dummy rows meanwhile."""
        for done, size in enumerate(sorted(self.sizes, reverse=True)):
            progress("capturing CUDA graphs", done / len(self.sizes))
            self._fill_with_dummies(size, dummy_row, dummy_slot)
            self._captured[size] = self._capture(size)
        progress("capturing CUDA graphs", 1.0)

    def replay(
        self, plan: StepPlan, buffer: torch.Tensor, mode: SamplingMode
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a loaded decode-only plan whose `padded_rows` is a captured size: int32[padded_rows] tokens, and the
        words of the log probabilities that `mode` wants.

        The tokens are overwritten by the next replay on the compute stream.
        """
        size = plan.padded_rows
        words = hot_words(size, size)
        self._buffer[:words].copy_(buffer[:words])
        captured = self._captured[size]
        captured.forward.replay()
        raw = None
        if mode.extras is not None:
            rows = hot_views(self._buffer, size, size).rows[: plan.num_samples].long()
            raw = self._sampler.take_raw(self._logits[: plan.num_samples], rows, mode)
        if mode.is_plain:
            (captured.noisy if mode.noisy else captured.greedy).replay()
        else:
            self._sample(size, plan.num_samples, mode)
        tokens = self._tokens[:size]
        return tokens, None if raw is None else self._sampler.sampled_logprobs(raw, tokens)

    def _capture(self, size: int) -> _Captured:
        # Once outside a capture: kernels are compiled and loaded, and buffers made, on their first run.
        self._forward(size)
        self._sample(size, size, GREEDY)
        self._sample(size, size, NOISY)
        self._device.synchronize()
        return _Captured(
            forward=self._record(lambda: self._forward(size)),
            greedy=self._record(lambda: self._sample(size, size, GREEDY)),
            noisy=self._record(lambda: self._sample(size, size, NOISY)),
        )

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        # Not the `torch.cuda.graph` context: it empties caches and, in some versions, collects garbage each time.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        return graph

    def _forward(self, size: int) -> None:
        batch = self._input.decode_batch(hot_views(self._buffer, size, size), self._max_seq_len)
        self._model.compute_logits(self._model(batch), out=self._logits[:size])

    def _sample(self, size: int, num_samples: int, mode: SamplingMode) -> None:
        hot = hot_views(self._buffer, size, size)
        rows, positions = hot.rows[:num_samples].long(), hot.device_len[:num_samples].long()
        tokens = self._sampler.sample(self._logits[:num_samples], rows, positions, mode)
        self._token_pool.scatter(rows, positions, tokens)
        self._tokens[:num_samples].copy_(tokens)

    def _fill_with_dummies(self, size: int, dummy_row: int, dummy_slot: int) -> None:
        hot = hot_views(self._buffer, size, size)
        hot.rows.fill_(dummy_row)
        hot.cached_len.fill_(0)
        hot.device_len.fill_(1)
        hot.out_loc.fill_(dummy_slot)
