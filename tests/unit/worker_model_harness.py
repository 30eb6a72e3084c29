"""Runs the model side of the worker alone: all ranks in this process, steps built by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from kvcache.pool import KVCacheLayout, create_kvcache_pool
from worker.attention import create_attention_backend
from worker.batch import Batch
from worker.model_config import ModelConfig
from worker.models.registry import CausalLM, ModelContext, create_model
from worker.page_table import PageTable
from worker.parallel import TPGroup, init_tp_group
from worker.symmetric_memory import why_not
from worker.weights import load_weights

torch.set_num_threads(1)


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.tensors: list[torch.Tensor | None] = [None] * size


class ThreadTPGroup(TPGroup):
    """Stands in for a process group: the ranks are threads of this process, and sums really go across them."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size, self.group, self._symmetric, self._meeting = rank, size, None, None, meeting

    @classmethod
    def create(cls, size: int) -> list[ThreadTPGroup]:
        meeting = _Meeting(size)
        return [cls(rank, size, meeting) for rank in range(size)]

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._meeting.tensors[self.rank] = tensor.clone()
        self._meeting.barrier.wait()
        tensors = list(self._meeting.tensors)
        self._meeting.barrier.wait()
        return tensors

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(sum(self._exchange(tensor)))

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return torch.cat(self._exchange(tensor), dim=dim)

    def barrier(self) -> None:
        self._meeting.barrier.wait()


def build_rank(
    path: Path,
    tp: TPGroup,
    page_size: int = 16,
    layout: KVCacheLayout = KVCacheLayout.LAYER_FIRST,
    max_seq_len: int = 64,
    num_rows: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[CausalLM, PageTable]:
    """A loaded model with its pool; every row of the page table holds its pages already, in shuffled order."""
    config = ModelConfig.from_pretrained(path)
    device = torch.device("cpu")
    ctx = ModelContext(tp, create_attention_backend("auto", device), dtype, device, max_seq_len=max_seq_len)
    model = create_model(config, ctx)
    load_weights(model, path, ctx)
    pages_per_row = -(-max_seq_len // page_size)
    num_pages = num_rows * pages_per_row
    pool = create_kvcache_pool(
        config.num_layers, num_pages + 1, page_size, config.num_kv_heads, config.head_dim, dtype, device, layout,
        tp.size, tp.rank,
    )  # fmt: skip
    table = PageTable(num_rows, max_seq_len, page_size, num_pages, device)
    shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    table.page_starts[:num_rows] = (shuffled.view(num_rows, pages_per_row) * page_size).int()
    ctx.attach(pool, table)
    return model, table


class ModelRig:
    """All ranks of one model, and the rows' token counts; `run` is one step.

    `outputs_only`: steps give the logits of each row's last token alone.
    """

    def __init__(self, path: Path, tp_size: int = 1, outputs_only: bool = False, **options) -> None:
        self.outputs_only = outputs_only
        groups = ThreadTPGroup.create(tp_size) if tp_size > 1 else [TPGroup.single()]
        self.ranks = [build_rank(path, tp, **options) for tp in groups]
        self.cached = np.zeros(len(self.ranks[0][1].page_starts) - 1, dtype=np.int32)

    def run(self, inputs: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """One step. `inputs`: row -> its new tokens. Returns logits [new tokens (or 1), vocab_size] of each row.

        Rows with one token that have stored tokens run as decodes, and first, as in the engine.
        """
        rows = sorted(inputs, key=lambda row: not self._decodes(row, inputs[row]))
        results = self._on_all_ranks(lambda rank: self._forward(rank, rows, inputs))
        logits = torch.cat(results, dim=1)
        padding = logits[:, self.ranks[0][0].vocab_size :]
        assert torch.equal(padding, torch.full_like(padding, float("-inf")))
        logits = logits[:, : self.ranks[0][0].vocab_size]
        for row in rows:
            self.cached[row] += len(inputs[row])
        counts = [1 if self.outputs_only else len(inputs[row]) for row in rows]
        return dict(zip(rows, logits.split(counts), strict=True))

    def feed(self, sequences: dict[int, list[int]], steps: list[dict[int, int]]) -> dict[int, torch.Tensor]:
        """Run `steps` (row -> how many of its tokens come next); returns each row's logits at all its positions."""
        parts: dict[int, list[torch.Tensor]] = {row: [] for row in sequences}
        for step in steps:
            inputs = {row: sequences[row][self.cached[row] : self.cached[row] + n] for row, n in step.items()}
            for row, logits in self.run(inputs).items():
                parts[row].append(logits)
        return {row: torch.cat(logits) for row, logits in parts.items()}

    def _decodes(self, row: int, tokens: list[int]) -> bool:
        return len(tokens) == 1 and self.cached[row] > 0

    def _forward(self, rank: int, rows: list[int], inputs: dict[int, list[int]]) -> torch.Tensor:
        model, table = self.ranks[rank]
        batch = make_batch(table, rows, self.cached, inputs, sum(self._decodes(row, inputs[row]) for row in rows))
        if self.outputs_only:
            last = {row: inputs[row][-1:] for row in rows}
            before = self.cached.copy()
            before[rows] += [len(inputs[row]) - 1 for row in rows]
            batch.outputs = make_batch(table, rows, before, last, len(rows))
        return model.compute_logits(model(batch))

    def _on_all_ranks(self, work: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        if len(self.ranks) == 1:
            return [work(0)]
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            return list(threads.map(work, range(len(self.ranks))))


def make_batch(
    table: PageTable, rows: list[int], cached: np.ndarray, inputs: dict[int, list[int]], num_decode: int
) -> Batch:
    """The step that appends `inputs[row]` to each row, in the order of `rows`."""
    extend = np.array([len(inputs[row]) for row in rows], dtype=np.int32)
    first = cached[rows].astype(np.int32)
    after = first + extend
    positions = torch.cat([torch.arange(a, b) for a, b in zip(first, after, strict=True)])
    token_rows = torch.tensor(np.repeat(rows, extend))
    return Batch(
        input_ids=torch.tensor([token for row in rows for token in inputs[row]]),
        positions=positions,
        out_loc=table.slots(token_rows, positions),
        rows=torch.tensor(rows, dtype=torch.int32),
        cached_len=torch.from_numpy(first),
        device_len=torch.from_numpy(after),
        cu_extend=torch.tensor([0, *np.cumsum(extend)], dtype=torch.int32),
        sample_index=torch.from_numpy(np.cumsum(extend) - 1),
        num_decode=num_decode,
        max_decode_len=int(after[:num_decode].max(initial=0)),
        max_prefill_len=int(after[num_decode:].max(initial=0)),
        max_extend_len=int(extend.max()),
        host_rows=np.array(rows, dtype=np.int32),
        host_cached_len=first,
        host_device_len=after,
    )


def gloo_rank(rank: int, size: int, store: str, path: str, results: SimpleQueue) -> None:
    """Body of a real rank process: rank 0 puts what the collectives and the model gave into `results`."""
    group = init_tp_group(rank, size, "cpu", f"file://{store}", timeout=60.0)
    summed = group.all_reduce(torch.full((2,), rank + 1.0, dtype=torch.bfloat16))
    gathered = group.all_gather(torch.tensor([[rank], [rank]]), dim=1)
    why = [why_not(group.group, torch.bfloat16, torch.device("cpu"))]
    with mock.patch("socket.gethostname", return_value=f"host{rank}"):
        why.append(why_not(group.group, torch.bfloat16, torch.device("cpu")))
    why.append(why_not(group.group, torch.float16, torch.device("cpu")))
    model, table = build_rank(path, group, page_size=4)
    tokens = {0: list(range(3, 15))}
    logits = model.compute_logits(model(make_batch(table, [0], np.zeros(1, dtype=np.int32), tokens, 0)))
    logits = group.all_gather(logits, dim=1)[:, : model.vocab_size]
    group.barrier()
    group.destroy()
    if rank == 0:
        results.put((summed.tolist(), gathered.tolist(), why, logits.tolist()))
