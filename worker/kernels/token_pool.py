"""The token pool's side of a decode step, each way one kernel: what comes in, and where the new tokens go."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 128


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "cached_ptr", "loc_ptr"])  # slices of a step's buffer
def _decode_inputs_kernel(
    tokens_ptr, rows_ptr, cached_ptr, loc_ptr, id_ptr, position_ptr, slot_ptr, count, stride, BLOCK: tl.constexpr
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = entry < count
    row = tl.load(rows_ptr + entry, mask=live, other=0).to(tl.int64)
    position = tl.load(cached_ptr + entry, mask=live, other=0).to(tl.int64)
    token = tl.load(tokens_ptr + row * stride + position, mask=live, other=0)
    tl.store(id_ptr + entry, token.to(tl.int64), mask=live)
    tl.store(position_ptr + entry, position, mask=live)
    tl.store(slot_ptr + entry, tl.load(loc_ptr + entry, mask=live, other=0).to(tl.int64), mask=live)


def decode_inputs(
    tokens: torch.Tensor, rows: torch.Tensor, cached_len: torch.Tensor, out_loc: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, positions and slots of B decode entries, int64[B] each.

    tokens: the pool, int32[rows, width]. rows, cached_len, out_loc: int32[B]; an entry's token is at its cached_len.
    """
    count = len(rows)
    ids, positions, slots = torch.empty(3, count, dtype=torch.int64, device=tokens.device).unbind()
    _decode_inputs_kernel[(triton.cdiv(count, _BLOCK),)](
        tokens, rows, cached_len, out_loc, ids, positions, slots, count, tokens.stride(0), BLOCK=_BLOCK, num_warps=4
    )
    return ids, positions, slots


@triton.jit(do_not_specialize_on_alignment=["row_ptr", "position_ptr", "new_ptr"])
def _scatter_kernel(tokens_ptr, row_ptr, position_ptr, new_ptr, count, stride, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = entry < count
    row = tl.load(row_ptr + entry, mask=live, other=0).to(tl.int64)
    position = tl.load(position_ptr + entry, mask=live, other=0)
    new = tl.load(new_ptr + entry, mask=live, other=0)
    tl.store(tokens_ptr + row * stride + position, tl.maximum(new, 0), mask=live)


def scatter_tokens(tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, new: torch.Tensor) -> None:
    """tokens[rows, positions] = max(new, 0): int32[rows, width], int64[S], int64[S], int32[S]."""
    count = len(rows)
    _scatter_kernel[(triton.cdiv(count, _BLOCK),)](
        tokens, rows, positions, new, count, tokens.stride(0), BLOCK=_BLOCK, num_warps=4
    )
