"""`Batch`: one step as the model sees it, all on the rank's device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Batch:
    """Device tensors of one step: T input tokens, B batch entries (decodes first), S sampled ones; int32 unless noted.

    input_ids     [T] int64   token ids, in batch order
    positions     [T] int64   absolute positions
    out_loc       [T] int64   slot each token's K/V is stored in
    rows          [B]         table row of each entry
    cached_len    [B]         tokens stored before the step
    device_len    [B]         tokens stored after it; extend_len = device_len - cached_len
    cu_extend     [B + 1]     prefix sums of extend_len: entry i's tokens are cu_extend[i] .. cu_extend[i + 1]
    sample_index  [S] int64   index into T of the last token of each sampled entry; of the last entry if none is sampled
    num_decode                entries (the first ones) with one token whose whole prefix earlier steps wrote
    max_decode_len, max_prefill_len, max_extend_len   host ints: device_len over decode / prefill entries, extend_len
    host_*                    the same lengths on the host (numpy int32), for backends that loop on the CPU
    tiles         [1 + 2 * N] in graphs, where the host knows no lengths: how many tiles the prefills' tokens make, of
                              each its entry (counted from the first after the decodes), and of each which run of that
                              entry's tokens it is; a decode of device_len 0 is none
    outputs                   the tokens at sample_index as a batch of decodes, where nobody needs the output of others;
                              None: all tokens leave the model
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_loc: torch.Tensor
    rows: torch.Tensor
    cached_len: torch.Tensor
    device_len: torch.Tensor
    cu_extend: torch.Tensor
    sample_index: torch.Tensor
    num_decode: int
    max_decode_len: int
    max_prefill_len: int
    max_extend_len: int
    host_rows: object
    host_cached_len: object
    host_device_len: object
    tiles: torch.Tensor | None = None
    outputs: Batch | None = None
