"""`StepInput`: a plan becomes one copy to the device, then views of that copy, then a `Batch`.

Everything a step changes on the device (page-table deltas, token-pool writes, sampling parameters) is applied from
views of the copied buffer. Shapes come from the plan's header on the host, so nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from scheduler.step import HEADER_WORDS, SAMPLING_WORDS, PlanExtras, StepPlan
from worker.batch import Batch
from worker.device import Device
from worker.page_table import PageTable
from worker.sampling import SamplingState
from worker.token_pool import TokenPool


@dataclass(slots=True)
class HotViews:
    """The hot sections of a copied plan: int32 views at offsets that depend on the padded sizes only."""

    rows: torch.Tensor
    cached_len: torch.Tensor
    device_len: torch.Tensor
    sample: torch.Tensor
    out_loc: torch.Tensor


def hot_words(padded_rows: int, padded_tokens: int) -> int:
    """Words of a plan up to the end of its hot part."""
    return HEADER_WORDS + 4 * padded_rows + padded_tokens


def hot_views(buffer: torch.Tensor, padded_rows: int, padded_tokens: int) -> HotViews:
    """The hot sections of a plan in `buffer` (int32, at least `hot_words` long), padding included."""
    sizes = [HEADER_WORDS, padded_rows, padded_rows, padded_rows, padded_rows, padded_tokens]
    return HotViews(*buffer[: sum(sizes)].split(sizes)[1:])


def sample_targets(hot: HotViews, num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Table rows and absolute positions of the tokens to sample: two int64[num_samples]."""
    entries = hot.sample[:num_samples].long()
    return hot.rows[entries].long(), hot.device_len[entries].long()


class StepInput:
    """Applies plans to the rank's device state and builds batches from them."""

    def __init__(
        self, device: Device, page_table: PageTable, token_pool: TokenPool, sampling: SamplingState,
        max_running_requests: int, max_step_tokens: int,
    ) -> None:  # fmt: skip
        self._device = device
        self._page_table = page_table
        self._token_pool = token_pool
        self._sampling = sampling
        most = max(max_running_requests, max_step_tokens) + 1
        self._arange = torch.arange(most, dtype=torch.int64, device=device.torch_device)
        self._arange32 = self._arange.to(torch.int32)

    def load(self, plan: StepPlan) -> torch.Tensor:
        """Copy the plan to the device and apply its deltas, token runs, and sampling sections, in this order.

        Returns the copied buffer, int32[len(plan.buffer)].
        """
        buffer = self._device.upload(plan.buffer)
        sizes = [
            hot_words(plan.padded_rows, plan.padded_tokens), plan.page_deltas.size, plan.token_runs.size,
            len(plan.run_tokens), plan.sampling.size, plan.suppress_runs.size, len(plan.suppress_ids),
        ]  # fmt: skip
        body, extras = buffer, None
        if plan.extras is not None:
            words = plan.extras.counts.words
            body, optional = buffer.split([len(buffer) - words, words])
            extras = PlanExtras(optional, plan.extras.counts)
        _, deltas, runs, run_tokens, sampling, suppress_runs, suppress_ids = body.split(sizes)
        if len(deltas):
            self._page_table.apply(deltas.view(-1, 3))
        if len(run_tokens):
            self._token_pool.write_runs(runs.view(-1, 3), run_tokens)
        self._sampling.apply(plan, sampling.view(-1, SAMPLING_WORDS), suppress_runs.view(-1, 3), suppress_ids, extras)
        return buffer

    def batch(self, plan: StepPlan, buffer: torch.Tensor) -> Batch:
        """The live entries of a loaded plan, padding left out; `outputs` unless prompt tokens are to be scored."""
        hot = hot_views(buffer, plan.padded_rows, plan.padded_tokens)
        count, tokens, decodes = plan.num_rows, plan.num_tokens, plan.num_decode
        host_cached, host_length = plan.cached_len[:count], plan.device_len[:count]
        extend = host_length - host_cached
        rows, cached, length = hot.rows[:count], hot.cached_len[:count], hot.device_len[:count]
        sample = hot.sample[: plan.num_samples].long() if plan.num_samples else self._arange[count - 1 : count]
        if plan.is_decode_only:
            cu_extend = self._arange32[: count + 1]
            positions, token_rows, sample_index = cached.long(), rows.long(), sample
        else:
            cu_extend = torch.zeros(count + 1, dtype=torch.int32, device=buffer.device)
            torch.cumsum(length - cached, 0, dtype=torch.int32, out=cu_extend[1:])
            entry = torch.repeat_interleave(self._arange[:count], (length - cached).long(), output_size=tokens)
            positions = self._tokens_arange(tokens) + (cached - cu_extend[:-1])[entry]
            token_rows = rows[entry].long()
            sample_index = cu_extend[1:][sample].long() - 1
        batch = Batch(
            input_ids=self._token_pool.gather(token_rows, positions),
            positions=positions,
            out_loc=hot.out_loc[:tokens].long(),
            rows=rows,
            cached_len=cached,
            device_len=length,
            cu_extend=cu_extend,
            sample_index=sample_index,
            num_decode=decodes,
            max_decode_len=_largest(host_length[:decodes]),
            max_prefill_len=_largest(host_length[decodes:]),
            max_extend_len=_largest(extend),
            host_rows=plan.rows[:count],
            host_cached_len=host_cached,
            host_device_len=host_length,
        )
        scored = plan.extras is not None and len(plan.extras.score_runs)
        if not plan.is_decode_only and not scored:
            batch.outputs = self._outputs(plan, batch, sample)
        return batch

    def _outputs(self, plan: StepPlan, batch: Batch, entries: torch.Tensor) -> Batch:
        """The tokens at `batch.sample_index`, of `entries` (int64[S]), as decodes: all K/V are stored by then."""
        index, count = batch.sample_index, len(entries)
        host_entries = plan.sample[:count] if plan.num_samples else np.array([plan.num_rows - 1])
        host_length = batch.host_device_len[host_entries]
        length = batch.device_len[entries]
        return Batch(
            input_ids=batch.input_ids[index],
            positions=batch.positions[index],
            out_loc=batch.out_loc[index],
            rows=batch.rows[entries],
            cached_len=length - 1,
            device_len=length,
            cu_extend=self._arange32[: count + 1],
            sample_index=self._arange[:count],
            num_decode=count,
            max_decode_len=_largest(host_length),
            max_prefill_len=0,
            max_extend_len=1,
            host_rows=batch.host_rows[host_entries],
            host_cached_len=host_length - 1,
            host_device_len=host_length,
        )

    def decode_batch(self, hot: HotViews, max_seq_len: int) -> Batch:
        """All padded entries of a decode-only plan, from views at fixed addresses: for capture into a graph. Each is
        sampled, in batch order.

        The host lengths are unknown when a graph is captured: `max_decode_len` is the largest possible one and the
        host arrays are None.
        """
        count = len(hot.rows)
        input_ids, positions, out_loc = self._token_pool.decode_inputs(hot.rows, hot.cached_len, hot.out_loc)
        return Batch(
            input_ids=input_ids,
            positions=positions,
            out_loc=out_loc,
            rows=hot.rows,
            cached_len=hot.cached_len,
            device_len=hot.device_len,
            cu_extend=self._arange32[: count + 1],
            sample_index=self._arange[:count],
            num_decode=count,
            max_decode_len=max_seq_len,
            max_prefill_len=0,
            max_extend_len=1,
            host_rows=None,
            host_cached_len=None,
            host_device_len=None,
        )

    def _tokens_arange(self, tokens: int) -> torch.Tensor:
        if tokens > len(self._arange):  # a snapshot plan may exceed the step budget
            return torch.arange(tokens, dtype=torch.int64, device=self._arange.device)
        return self._arange[:tokens]


def _largest(lengths: np.ndarray) -> int:
    return int(lengths.max()) if len(lengths) else 0
