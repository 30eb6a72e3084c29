"""Zeros behind each sequence's last value in its last page, for kernels that read whole pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["page_ptr", "length_ptr"])  # slices of a step's buffer
def _clear_tails_kernel(
    v_ptr, page_ptr, length_ptr, page_stride, v_page, v_token, v_head,
    PAGE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(length_ptr + entry)
    used = (length - 1) % PAGE + 1
    page = tl.load(page_ptr + entry * page_stride + (length - 1) // PAGE).to(tl.int64)
    column = tl.arange(0, D_PAD)[None, :]
    base = v_ptr + page * v_page + head * v_head
    for first in range(0, PAGE, BLOCK):
        token = first + tl.arange(0, BLOCK)[:, None]
        unused = (token >= used) & (token < PAGE) & (column < D)
        tl.store(base + token * v_token + column, tl.zeros([BLOCK, D_PAD], v_ptr.dtype.element_ty), mask=unused)


def clear_tails(v_cache: torch.Tensor, pages: torch.Tensor, device_len: torch.Tensor) -> None:
    """Set the values behind the last of each of E sequences to zero, up to the end of its last page.

    Args:
        v_cache: [num_pages, page_size, num_kv_heads, head_dim], unit head_dim stride.
        pages: int32[E, width], each sequence's page ids.
        device_len: int32[E], its tokens; at least 1.
    """
    _, page_size, heads, dim = v_cache.shape
    _clear_tails_kernel[(len(device_len), heads)](
        v_cache, pages, device_len, pages.stride(0), v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
        PAGE=page_size, D=dim, D_PAD=triton.next_power_of_2(dim), BLOCK=32, num_warps=4,
    )  # fmt: skip
