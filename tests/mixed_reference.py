"""What a captured step with prefills must compute, in plain Python and torch: its inputs, and attention over tiles."""

from __future__ import annotations

import torch

from scheduler.step import HEADER_WORDS, H, StepPlan
from worker.attention.torch_backend import TorchAttention
from worker.batch import Batch
from worker.graphs.mixed import MixedInputs


def mixed_inputs(
    buffer: torch.Tensor, tokens: torch.Tensor, size_t: int, size_s: int, prefills: int, tile: int, dummy_row: int,
    dummy_slot: int,
) -> MixedInputs:  # fmt: skip
    """Of the plan whose hot part lies in `buffer`; see `worker.kernels.mixed_inputs`."""
    words = buffer.cpu()
    header = words[:HEADER_WORDS].tolist()
    rows, padded = header[H.NUM_ROWS], header[H.PADDED_ROWS]
    sections = words[HEADER_WORDS:].tolist()
    row, cached, length, sample = (sections[i * padded : i * padded + rows] for i in range(4))
    slots = sections[4 * padded :]
    extend = [n - c for n, c in zip(length, cached, strict=True)]
    start = [sum(extend[:i]) for i in range(rows)]

    pad_t, pad_s = size_t - sum(extend), size_s - rows
    of_rows = [(r, c + i) for r, c, n in zip(row, cached, extend, strict=True) for i in range(n)]
    positions = [position for _, position in of_rows]
    ids = [int(tokens[place]) for place in of_rows]
    decodes = [n if i < header[H.NUM_DECODE] else 0 for i, n in enumerate(length)]
    sampled = sample[: header[H.NUM_SAMPLES]]
    none = [0] * (size_s - len(sampled))
    tiles = [
        (i, block)
        for i in range(header[H.NUM_DECODE], rows)
        for block in reversed(range(-(-extend[i] // tile)))
    ]  # fmt: skip
    count = len(tiles)
    tiles += [(0, 0)] * (-(-size_t // tile) + prefills - count)

    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=buffer.device)

    return MixedInputs(
        input_ids=ints(ids + [0] * pad_t, torch.int64),
        positions=ints(positions + [0] * pad_t, torch.int64),
        out_loc=ints(slots[: sum(extend)] + [dummy_slot] * pad_t, torch.int64),
        rows=ints(2 * (row + [dummy_row] * pad_s)),
        cached_len=ints(2 * (cached + [0] * pad_s)),
        device_len=ints(decodes + [0] * pad_s + length + [0] * pad_s),
        cu_extend=ints([0] * size_s + start + [sum(extend)] * pad_s + [0]),
        index=ints([start[i] + extend[i] - 1 for i in sampled] + none, torch.int64),
        sample_rows=ints([row[i] for i in sampled] + [dummy_row] * len(none), torch.int64),
        sample_positions=ints([length[i] for i in sampled] + none, torch.int64),
        tiles=ints([count, *(entry for entry, _ in tiles), *(block for _, block in tiles)]),
    )


class TiledAttention(TorchAttention):
    """Plain attention that also takes batches with `tiles`, of `tile` tokens each."""

    def __init__(self, tile: int) -> None:
        super().__init__()
        self.tile = tile

    def prepare(self, batch: Batch) -> None:
        if batch.tiles is None:
            super().prepare(batch)

    def forward(self, q: torch.Tensor, layer_id: int, batch: Batch) -> torch.Tensor:
        if batch.tiles is None:
            return super().forward(q, layer_id, batch)
        out = torch.zeros_like(q)
        decodes = batch.num_decode
        for entry in batch.device_len[:decodes].nonzero()[:, 0].tolist():
            self._attend(q, out, layer_id, batch, entry, slice(entry, entry + 1))
        count, entries, blocks = batch.tiles.split([1, len(batch.tiles) // 2, len(batch.tiles) // 2])
        for entry, block in zip(entries[:count].tolist(), blocks[:count].tolist(), strict=True):
            entry += decodes
            extend = int(batch.device_len[entry] - batch.cached_len[entry])
            first = int(batch.cu_extend[entry])
            tokens = range(extend)[block * self.tile : (block + 1) * self.tile]
            assert tokens, "a tile without tokens"
            self._attend(q, out, layer_id, batch, entry, slice(first + tokens.start, first + tokens.stop), tokens.start)
        return out

    def _attend(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        layer_id: int,
        batch: Batch,
        entry: int,
        tokens: slice,
        skipped: int = 0,
    ) -> None:
        """The tokens `tokens` of q, which come `skipped` after the first new one of their entry."""
        length = int(batch.device_len[entry])
        slots = self.page_table.slots(batch.rows[entry], torch.arange(length))
        k, v = (cache.flatten(0, 1)[slots] for cache in (self.pool.k_cache(layer_id), self.pool.v_cache(layer_id)))
        group = q.shape[1] // k.shape[1]
        score = torch.einsum("thd,nhd->htn", q[tokens], k.repeat_interleave(group, 1)) * q.shape[2] ** -0.5
        position = int(batch.cached_len[entry]) + skipped + torch.arange(tokens.stop - tokens.start)
        score.masked_fill_(torch.arange(length) > position[:, None], float("-inf"))
        out[tokens] = torch.einsum("htn,nhd->thd", score.softmax(-1), v.repeat_interleave(group, 1))


def hot_part(plan: StepPlan, words: int) -> torch.Tensor:
    """The plan's beginning in a buffer of `words`, behind which lies what other plans left."""
    buffer = torch.full((words,), 10**6, dtype=torch.int32)
    used = HEADER_WORDS + 4 * plan.padded_rows + plan.padded_tokens
    buffer[:used] = torch.from_numpy(plan.buffer[:used])
    return buffer
