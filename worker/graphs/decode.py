"""Forward graphs of decode-only steps, one per batch size.

A decode-only plan is padded by the scheduler to one of the captured sizes; padding entries name the dummy row and the
dummy page. The plan's hot part is copied, on the compute stream, into one static buffer where every graph reads rows,
lengths and slots from, so plan k + 1 cannot overwrite what graph k reads.
"""

from __future__ import annotations

import torch

from scheduler.step import StepPlan
from worker.graphs.recorder import Recorder
from worker.graphs.samplers import SamplerGraphs
from worker.models.base import CausalLM
from worker.step_input import StepInput, hot_views, hot_words


def decode_graph_sizes(max_running_requests: int, largest: int = 512) -> tuple[int, ...]:
    """Batch sizes worth a graph, ascending: dense where a step is short, every 8 or 16 beyond, the maximum itself."""
    most = min(max_running_requests, largest)
    sizes = {1, 2, 4, *range(8, min(most, 256) + 1, 8), *range(256, most + 1, 16), most}
    return tuple(sorted(size for size in sizes if size <= most))


class DecodeGraphs:
    """Captures and replays the forward pass of decode steps of fixed batch sizes, up to `largest`.

    Args:
        max_seq_len: the largest `device_len` a graph must handle.
    """

    def __init__(
        self, model: CausalLM, step_input: StepInput, samplers: SamplerGraphs, largest: int, max_seq_len: int
    ) -> None:
        self._model, self._input, self._samplers = model, step_input, samplers
        self._max_seq_len = max_seq_len
        self._buffer = torch.zeros(hot_words(largest, largest), dtype=torch.int32, device=model.ctx.device)
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self, size: int, dummy_row: int, dummy_slot: int, recorder: Recorder) -> None:
        """Capture one size. The static buffer holds dummy rows meanwhile."""
        hot = hot_views(self._buffer, size, size)
        hot.rows.fill_(dummy_row)
        hot.cached_len.fill_(0)
        hot.device_len.fill_(1)
        hot.out_loc.fill_(dummy_slot)
        self._forward(size)
        self._captured[size] = recorder.record(lambda: self._forward(size))

    def fits(self, plan: StepPlan) -> bool:
        """Whether the plan is of decodes only, padded to a captured size."""
        return plan.is_decode_only and plan.padded_rows in self._captured

    def replay(self, plan: StepPlan, buffer: torch.Tensor) -> int:
        """Run the forward pass of a loaded plan that fits; its logits lie in the samplers' buffer then. Returns the
        size of the samplers to run."""
        size = plan.padded_rows
        words = hot_words(size, size)
        self._buffer[:words].copy_(buffer[:words])
        self._captured[size].replay()
        return size

    def _forward(self, size: int) -> None:
        hot, samplers = hot_views(self._buffer, size, size), self._samplers
        samplers.rows[:size].copy_(hot.rows)
        samplers.positions[:size].copy_(hot.device_len)
        batch = self._input.decode_batch(hot, self._max_seq_len)
        self._model.compute_logits(self._model(batch), out=samplers.logits[:size])
