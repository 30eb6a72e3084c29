"""`StepGraphs`: all graphs of a rank, and which one a step runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from scheduler.step import StepPlan
from worker.graphs.decode import DecodeGraphs, decode_graph_sizes
from worker.graphs.mixed import MixedGraphs, MixedSize, mixed_graph_sizes
from worker.graphs.recorder import Recorder
from worker.graphs.samplers import SamplerGraphs
from worker.models.base import CausalLM
from worker.sampling import Sampler, SamplingMode
from worker.step_input import StepInput
from worker.token_pool import TokenPool


@dataclass(frozen=True)
class GraphSizes:
    """What is captured, ascending: batch sizes of decode steps, and sizes of steps with prefills, whose numbers of
    entries are among the former."""

    decode: tuple[int, ...]
    mixed: tuple[MixedSize, ...]

    @classmethod
    def of(cls, model: CausalLM, max_running_requests: int, max_step_tokens: int) -> GraphSizes:
        """What is worth capturing for a model with these limits."""
        decode = decode_graph_sizes(max_running_requests)
        layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
        return cls(decode, mixed_graph_sizes(decode, max_step_tokens, layer))


class StepGraphs:
    """Forward graphs of decode steps and of small mixed steps, with the samplers that both share. CUDA only.

    Args:
        max_seq_len: the largest `device_len` a graph must handle.
    """

    def __init__(
        self, model: CausalLM, step_input: StepInput, sampler: Sampler, token_pool: TokenPool, sizes: GraphSizes,
        max_seq_len: int, recorder: Recorder,
    ) -> None:  # fmt: skip
        self._sizes, self._recorder = sizes, recorder
        largest = sizes.decode[-1]
        self._samplers = SamplerGraphs(model, sampler, token_pool, largest)
        self._decode = DecodeGraphs(model, step_input, self._samplers, largest, max_seq_len)
        self._mixed = MixedGraphs(model, token_pool, self._samplers, sizes.mixed, max_seq_len)

    def capture(self, dummy_row: int, dummy_slot: int, progress: Callable[[str, float], None]) -> None:
        """Capture every size, largest first: the pool that all share is then as large as the largest needs."""
        place = (dummy_row, dummy_slot, self._recorder)
        mixed, decode = self._sizes.mixed, self._sizes.decode
        total = len(mixed) + len(decode)
        for done, size in enumerate(reversed(mixed)):
            progress("capturing CUDA graphs", done / total)
            self._mixed.capture(size, *place)
        for done, size in enumerate(reversed(decode), len(mixed)):
            progress("capturing CUDA graphs", done / total)
            self._decode.capture(size, *place)
            self._samplers.capture(size, self._recorder)
        progress("capturing CUDA graphs", 1.0)

    def run(
        self, plan: StepPlan, buffer: torch.Tensor, mode: SamplingMode
    ) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """Run a loaded plan and sample: int32 tokens of its samples, maybe padded, and the words of the log
        probabilities that `mode` wants. None: there is no graph for this plan, and nothing has run."""
        if self._decode.fits(plan):
            size = self._decode.replay(plan, buffer)
        elif not plan.is_decode_only and (mixed := self._mixed.fit(plan)) is not None:
            size = self._mixed.replay(plan, buffer, mixed)
        else:
            return None
        if not plan.num_samples:
            return None, None
        return self._samplers.run(size, plan.num_samples, mode)
