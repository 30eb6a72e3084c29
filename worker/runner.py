"""`ModelRunner`: one rank's model, KV pool and device state, driven by step plans.

The order of life: `load` (weights), `max_pages` (what memory holds; the driver takes the minimum over ranks),
`allocate` (pool and mirrors), `warm_up` (compile, capture), then `launch` once per plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvcache.pool import BaseKVCachePool, KVCacheLayout, create_kvcache_pool, local_kv_heads
from scheduler.step import StepPlan, StepResult
from worker.attention import TorchAttention, create_attention_backend
from worker.config import WorkerConfig
from worker.device import Download, create_device
from worker.errors import ModelError
from worker.graphs import GraphSizes, Recorder, StepGraphs
from worker.layers.ops import LayerOps, create_ops
from worker.memory import await_predecessor, cpu_bytes, cpu_room, cuda_room, graph_bytes, no_room
from worker.model_config import ModelConfig, check_tp_size
from worker.models.registry import ModelContext, create_model
from worker.page_table import PageTable
from worker.parallel import TPGroup
from worker.sampling import Sampler, SamplingMode
from worker.sampling.logprobs import slice_rows
from worker.step_input import StepInput, hot_views, sample_targets
from worker.step_output import OutputLayout, score_inputs
from worker.token_pool import TokenPool
from worker.warm_up import largest_step, small_steps
from worker.weights import load_weights

Progress = Callable[[str, float], None]

MAX_STAGING_WORDS = 1 << 22
"""Where the staging buffers of plans and results start at most; they grow when needed."""


@dataclass(frozen=True)
class ModelInfo:
    """What the driver needs to know about the model.

    max_seq_len       tokens per request: the configured limit, or the model's
    eos_token_ids     as the checkpoint's configuration files name them
    page_bytes        memory of one KV page on this rank
    """

    architecture: str
    vocab_size: int
    max_seq_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    page_bytes: int


class PendingStep:
    """A launched step. Steps finish in launch order."""

    __slots__ = ("_download", "_layout", "step_id")

    def __init__(self, step_id: int, layout: OutputLayout, download: Download | None) -> None:
        self.step_id = step_id
        self._layout = layout
        self._download = download

    def result(self) -> StepResult:
        """The sampled tokens, and log probabilities. Blocks until the step has run; every rank has the same ones."""
        if self._download is None:
            return StepResult(self.step_id, np.empty(0, dtype=np.int32))
        return self._layout.result(self.step_id, self._download.wait())


class ModelRunner:
    """Runs step plans on one rank. All calls come from one thread.

    Args:
        progress: called with a phase and the share of it that is done, 0.0 to 1.0.

    Raises:
        ModelError: the checkpoint or a setting does not fit, e.g. a tensor-parallel size that does not divide.
    """

    def __init__(self, config: WorkerConfig, tp: TPGroup, progress: Progress = lambda phase, done: None) -> None:
        self.config = config
        self._tp = tp
        self._progress = progress
        self._model_config = ModelConfig.from_pretrained(config.model_path)
        check_tp_size(self._model_config, tp.size)
        if config.max_seq_len is not None:
            self._model_config.check_max_seq_len(config.max_seq_len)
        self._max_seq_len = config.max_seq_len or self._model_config.context_limit
        # No step is larger, whatever the budget.
        self._step_tokens = min(config.max_step_tokens, config.max_running_requests * self._max_seq_len)
        self._dtype = self._model_config.compute_dtype(config.dtype, config.device)
        self._device = create_device(
            config.device,
            config.device_index,
            upload_words=min(8 * (config.max_running_requests + self._step_tokens) + 4096, MAX_STAGING_WORDS),
            download_words=min(config.max_running_requests + 1, MAX_STAGING_WORDS),
        )
        self._context = ModelContext(
            tp=tp,
            attention=create_attention_backend(config.attention_backend, self._device.torch_device, self._dtype),
            dtype=self._dtype,
            device=self._device.torch_device,
            max_seq_len=self._max_seq_len,
            ops=LayerOps() if config.attention_backend == "torch" else create_ops(self._device.torch_device),
        )
        self._graphs: StepGraphs | None = None

    @property
    def model_info(self) -> ModelInfo:
        model = self._model_config
        return ModelInfo(
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_seq_len=self._max_seq_len,
            eos_token_ids=model.eos_token_ids,
            dtype=str(self._dtype).removeprefix("torch."),
            page_bytes=self.page_bytes,
        )

    @property
    def page_bytes(self) -> int:
        """Memory of one KV page on this rank: K and V of every layer."""
        model = self._model_config
        heads, _ = local_kv_heads(model.num_kv_heads, self._tp.size, self._tp.rank)
        return 2 * model.num_layers * self.config.page_size * heads * model.head_dim * self._dtype.itemsize

    @property
    def _captures(self) -> bool:
        """The torch attention backend plans on the host, so its steps cannot be captured."""
        graphs = self.config.use_graphs and self._device.supports_graphs
        return graphs and not isinstance(self._context.attention, TorchAttention)

    def load(self) -> None:
        """Create the model and stream this rank's shard of the weights.

        Raises:
            ModelError: the checkpoint lacks a tensor, or holds one of another shape.
        """
        if self.config.device == "cuda" and self.config.pages_fitted:
            await_predecessor(self._device, self.config.memory_utilization)
        with self._device.compute():
            self._tp.use_symmetric_memory(self._dtype, self._device.torch_device)
            self._model = create_model(self._model_config, self._context)
            load_weights(self._model, self.config.model_path, self._context, self._progress, self.config.load_format)
            self._device.synchronize()

    def max_pages(self) -> int:
        """Usable KV pages that this rank's memory holds, at most what all rows can use.

        CPU: a share of the memory available now, divided among this machine's ranks. CUDA: what
        `memory_utilization` leaves after the weights and the largest step, which is run once to measure it.
        A configured `num_pages` is checked against that memory (on the CPU against all of it) and returned, one that
        fitted before at once.

        Raises:
            ModelError: the configured pages, or even one, do not fit; says how much memory there is.
        """
        config = self.config
        if config.num_pages and config.pages_fitted:
            return config.num_pages
        needed = 0
        if config.device == "cuda":
            room = self._cuda_room()
        else:
            needed = cpu_bytes(self._model_config, config, self._max_seq_len, self._dtype)
            room = cpu_room(self._device, config, needed)
        fitting = room // self.page_bytes - 1  # one for the dummy page
        if fitting < (config.num_pages or 1):
            raise no_room(config, self._max_seq_len, self.page_bytes, room, needed)
        useful = config.max_running_requests * -(-self._max_seq_len // config.page_size)
        return config.num_pages or min(useful, fitting)

    def allocate(self, num_pages: int) -> None:
        """Create the pool of `num_pages` usable pages (and the dummy page), page table, token pool and sampler."""
        config, device = self.config, self._device.torch_device
        model = self._model_config
        with self._device.compute():
            self._pool: BaseKVCachePool = create_kvcache_pool(
                model.num_layers, num_pages + 1, config.page_size, model.num_kv_heads, model.head_dim, self._dtype,
                device, KVCacheLayout(config.kv_layout), self._tp.size, self._tp.rank,
            )  # fmt: skip
            rows = config.max_running_requests
            self._page_table = PageTable(rows, self._max_seq_len, config.page_size, num_pages, device)
            self._token_pool = TokenPool(rows, self._max_seq_len, config.page_size, device)
            padded_vocab = self._model.lm_head.local_size * self._tp.size
            self._sampler = Sampler(rows, padded_vocab, self._model.vocab_start, self._tp, device)
            self._input = StepInput(
                self._device, self._page_table, self._token_pool, self._sampler.state, rows, self._step_tokens
            )
            self._context.attach(self._pool, self._page_table)
            self._device.synchronize()

    def warm_up(self) -> tuple[int, ...]:
        """Compile and capture what the steps will need; the batch sizes of decode graphs, () if there are none.

        Leaves no trace in the pool: only the dummy page is written.
        """
        if self.config.device != "cuda":
            return ()
        config, attention = self.config, self._context.attention
        self._progress("compiling kernels", 0.0)
        attention.compile(self._model_config.num_heads // self._tp.size)
        self._run_largest_step()
        steps = small_steps(
            config.max_running_requests, config.max_step_tokens, self._max_seq_len, self._page_table.dummy_slot
        )
        for done, plan in enumerate(steps):
            self._progress("compiling kernels", done / len(steps))
            self.launch(plan).result()
        self._progress("compiling kernels", 1.0)
        sizes = self._capture() if self._captures else ()
        attention.finish_compiling()
        return sizes

    def _capture(self) -> tuple[int, ...]:
        sizes = self._graph_sizes()
        graphs = StepGraphs(
            self._model, self._input, self._sampler, self._token_pool, sizes, self._max_seq_len, Recorder()
        )
        with torch.inference_mode(), self._device.compute():
            graphs.capture(self._page_table.dummy_row, self._page_table.dummy_slot, self._progress)
        self._device.synchronize()
        self._graphs = graphs
        return sizes.decode

    def _graph_sizes(self) -> GraphSizes:
        return GraphSizes.of(self._model, self.config.max_running_requests, self._step_tokens)

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start one step. On CUDA this returns as soon as the work is queued; on the CPU the step has run.

        The plan's buffer may be reused when this returns.
        """
        with torch.inference_mode(), self._device.compute():
            buffer = self._input.load(plan)
            sampled = plan.sample[: plan.num_samples]
            mode = self._sampler.state.mode(plan.rows[sampled], plan.device_len[sampled])
            layout = OutputLayout.of(plan, mode)
            words = self._step(plan, buffer, mode, layout) if plan.num_rows else None
            self._device.release_upload()
            download = None if words is None else self._device.download(words)
        return PendingStep(plan.step_id, layout, download)

    def _step(
        self, plan: StepPlan, buffer: torch.Tensor, mode: SamplingMode, layout: OutputLayout
    ) -> torch.Tensor | None:
        """Forward and sample a loaded plan: the words of its `layout`, or None."""
        if self._graphs is not None and (sampled := self._graphs.run(plan, buffer, mode)) is not None:
            return layout.join(*sampled, None)
        batch = self._input.batch(plan, buffer)
        hidden = self._model(batch)
        scores = None if layout.score_runs is None else self._score(plan, buffer, hidden, layout.score_top)
        if not plan.num_samples:
            return layout.join(None, None, scores)
        logits = self._model.compute_logits(hidden if batch.outputs is not None else hidden[batch.sample_index])
        hot = hot_views(buffer, plan.padded_rows, plan.padded_tokens)
        rows, positions = sample_targets(hot, plan.num_samples)
        raw = self._sampler.take_raw(logits, rows, mode)
        tokens = self._sampler.sample(logits, rows, positions, mode)
        self._token_pool.scatter(rows, positions, tokens)
        return layout.join(tokens, None if raw is None else self._sampler.sampled_logprobs(raw, tokens), scores)

    def _score(self, plan: StepPlan, buffer: torch.Tensor, hidden: torch.Tensor, top: int) -> torch.Tensor:
        """Log probabilities of the prompt tokens that the plan wants scored, a slice of logits at a time."""
        inputs, targets = score_inputs(plan, buffer)
        rows = slice_rows(self._model.lm_head.local_size)
        parts = [
            self._sampler.logprobs(self._model.compute_logits(hidden[some]), wanted, top)
            for some, wanted in zip(inputs.split(rows), targets.split(rows), strict=True)
        ]
        return torch.cat(parts)

    def _run_largest_step(self) -> None:
        rows, budget = self.config.max_running_requests, self.config.max_step_tokens
        self.launch(largest_step(rows, self._max_seq_len, budget, self._page_table.dummy_slot)).result()
        self._device.synchronize()

    def _cuda_room(self) -> int:
        self._progress("measuring memory", 0.0)
        config = self.config
        try:
            self.allocate(1)
            room = cuda_room(self._device, config, self._run_largest_step)
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"no memory for a step of max_step_tokens {config.max_step_tokens} and max_running_requests "
                f"{config.max_running_requests} rows of {self._max_seq_len} tokens beside the weights; lower these, or "
                f"use more ranks: {error}"
            ) from error
        self._progress("measuring memory", 1.0)
        if self._captures:
            room -= graph_bytes(self._graph_sizes(), self._model_config, self._tp.size, self._dtype)
        return room
