"""Forward graphs of small steps with prefills, one per number of tokens and of entries.

Launched kernel by kernel, such a step takes the host half a millisecond a layer, which the card has done with long
before where the model or the step is small. What differs between steps of one size (which entries are decodes, where
each prefill begins) the graph reads from the plan itself, which is copied into a static buffer: its first kernel makes
all inputs from it (`kernels/mixed_inputs.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from scheduler.step import StepPlan
from worker.batch import Batch
from worker.graphs.recorder import Recorder
from worker.graphs.samplers import SamplerGraphs
from worker.models.base import CausalLM
from worker.step_input import hot_words
from worker.token_pool import TokenPool

TOKENS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 3072, 4096)
FEW_ENTRIES = 32
MAX_PREFILLS = 64
# Of a layer on an H200: a step with more arithmetic than fits in this time does not wait for its launches.
LAUNCH_SECONDS = 0.45e-3
FLOPS = 6e14
# Of a layer's attention, the causal half not subtracted: beyond, FlashAttention-4 is worth those launches, too.
ATTENTION_FLOPS = 1.5e11


class MixedSize(NamedTuple):
    """Tokens and entries that a graph has room for."""

    tokens: int
    entries: int


def mixed_graph_sizes(
    decode_sizes: tuple[int, ...], max_step_tokens: int, layer_parameters: int
) -> tuple[MixedSize, ...]:
    """Sizes worth a graph, ascending: for few and for many entries, up to the tokens that keep the card busy for longer
    than the host. The numbers of entries are among `decode_sizes`.

    Args:
        layer_parameters: weights of one layer on this rank.
    """
    useful = int(LAUNCH_SECONDS * FLOPS / (2 * layer_parameters))
    limit = min(max_step_tokens, useful, TOKENS[-1])
    sizes = set()
    for tokens in {*(count for count in TOKENS if count <= limit), limit}:
        for entries in (FEW_ENTRIES, decode_sizes[-1]):
            fitting = [size for size in decode_sizes if size <= min(entries, tokens)]
            sizes |= {MixedSize(tokens, size) for size in fitting[-1:]}
    return tuple(sorted(sizes))


class MixedInputs(NamedTuple):
    """What a mixed step of T tokens and S entries needs on the device, padded to its graph's size.

    input_ids, positions, out_loc   [T] int64; padding is token 0 at position 0 of the dummy page
    rows, cached_len, device_len    [2 * S] int32: the entries as decodes, those that are none with device_len 0, and
                                    behind them all of them once more as prefills
    cu_extend                       [2 * S + 1] int32: first token of each entry; of the second half alone
    index, sample_rows, sample_positions   [S] int64: of the sampled entries, the token in T and where the new one goes;
                                    padding is token 0, the dummy row, position 0
    tiles                           [1 + 2 * N] int32, see `Batch`
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_loc: torch.Tensor
    rows: torch.Tensor
    cached_len: torch.Tensor
    device_len: torch.Tensor
    cu_extend: torch.Tensor
    index: torch.Tensor
    sample_rows: torch.Tensor
    sample_positions: torch.Tensor
    tiles: torch.Tensor


class MixedGraphs:
    """Captures and replays the forward pass of steps of up to each of `sizes`.

    Args:
        max_seq_len: the largest `device_len` a graph must handle.
    """

    def __init__(
        self, model: CausalLM, token_pool: TokenPool, samplers: SamplerGraphs, sizes: tuple[MixedSize, ...],
        max_seq_len: int,
    ) -> None:  # fmt: skip
        self._model, self._token_pool, self._samplers = model, token_pool, samplers
        self._sizes, self._max_seq_len = sizes, max_seq_len
        self._flops_of_a_key = 4.0 * model.config.num_heads * model.config.head_dim / model.ctx.tp.size
        most = [max(counts) for counts in zip(*sizes, strict=True)] or [0, 0]
        self._buffer = torch.zeros(hot_words(most[1], most[0]), dtype=torch.int32, device=model.ctx.device)
        self._captured: dict[MixedSize, torch.cuda.CUDAGraph] = {}

    def capture(self, size: MixedSize, dummy_row: int, dummy_slot: int, recorder: Recorder) -> None:
        """Capture one size. The static buffer holds a plan without entries meanwhile: everything is padding."""
        self._buffer.zero_()
        self._forward(size, dummy_row, dummy_slot)
        self._captured[size] = recorder.record(lambda: self._forward(size, dummy_row, dummy_slot))

    def fit(self, plan: StepPlan) -> MixedSize | None:
        """The smallest captured size that the plan fits, the same on every rank; None: it has to run eagerly."""
        if plan.num_rows - plan.num_decode > MAX_PREFILLS or (plan.extras is not None and len(plan.extras.score_runs)):
            return None
        prefills = slice(plan.num_decode, plan.num_rows)
        lengths = plan.device_len[prefills].astype(np.int64)
        if self._flops_of_a_key * float((lengths - plan.cached_len[prefills]) @ lengths) > ATTENTION_FLOPS:
            return None
        return next((s for s in self._sizes if s.tokens >= plan.num_tokens and s.entries >= plan.num_rows), None)

    def replay(self, plan: StepPlan, buffer: torch.Tensor, size: MixedSize) -> int:
        """Run the forward pass of a loaded plan that fits; its logits lie in the samplers' buffer then. Returns the
        size of the samplers to run."""
        words = hot_words(plan.padded_rows, plan.padded_tokens)
        self._buffer[:words].copy_(buffer[:words])
        self._captured[size].replay()
        return size.entries

    def _forward(self, size: MixedSize, dummy_row: int, dummy_slot: int) -> None:
        tokens, entries = size
        inputs = self._inputs(size, dummy_row, dummy_slot)
        samplers = self._samplers
        samplers.rows[:entries].copy_(inputs.sample_rows)
        samplers.positions[:entries].copy_(inputs.sample_positions)
        batch = Batch(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            out_loc=inputs.out_loc,
            rows=inputs.rows,
            cached_len=inputs.cached_len,
            device_len=inputs.device_len,
            cu_extend=inputs.cu_extend,
            sample_index=inputs.index,
            num_decode=entries,
            max_decode_len=self._max_seq_len,
            max_prefill_len=self._max_seq_len,
            max_extend_len=tokens,
            host_rows=None,
            host_cached_len=None,
            host_device_len=None,
            tiles=inputs.tiles,
        )
        hidden = self._model(batch)
        self._model.compute_logits(hidden[inputs.index], out=samplers.logits[:entries])

    def _inputs(self, size: MixedSize, dummy_row: int, dummy_slot: int) -> MixedInputs:
        from worker.kernels.mixed_inputs import mixed_inputs  # triton comes with torch for CUDA only
        from worker.kernels.tiled_prefill import tile_tokens

        attention = self._model.model.layers[0].self_attn
        config, dtype = self._model.config, self._model.ctx.dtype
        tile = tile_tokens(size.tokens, attention.num_heads // attention.num_kv_heads, config.head_dim, dtype)
        prefills = min(MAX_PREFILLS, size.entries)
        return MixedInputs(
            *mixed_inputs(self._buffer, self._token_pool.tokens, *size, prefills, tile, dummy_row, dummy_slot)
        )
