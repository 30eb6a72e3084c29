"""FlashAttention-4 as the prefill kernel (package `flash-attn-4`, Hopper and newer), loaded in a thread.

Importing it takes about ten seconds and its first call compiles for a few more, unless the compiled kernel lies in its
disk cache. Beside other imports and the rank's start that is time added to theirs: Python runs one thread at a time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

CACHE_DIR = Path.home() / ".cache" / "raydix" / "flash-attention"

# Calls with more entries compile another variant, at its first use: they stay with the Triton kernel.
MAX_ENTRIES = 256
# Attention FLOPs of a layer below which the launch (about 0.2 ms of host time) costs more than the faster kernel saves.
MIN_FLOPS = 4e10
# Pages of this size and above may be read whole, and a NaN in a value that nobody has written would count.
WHOLE_PAGES = 64


def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why FlashAttention-4 cannot be used here, or None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return "it needs a GPU of compute capability 9.0 or newer"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not {dtype}"
    try:
        found = importlib.util.find_spec("flash_attn.cute")  # imports the parent package, which older versions share
    except ImportError as error:
        return f"flash_attn cannot be imported: {error}"
    return None if found else "the package flash-attn-4 is not installed"


class FlashPrefill:
    """The kernel for one model shape: importing begins with `start`, compiling with `compile`; then it is `ready`, or
    there is an `error`."""

    def __init__(self) -> None:
        self._call: Callable[..., object] | None = None
        self._shape: tuple[int, torch.Tensor, torch.Tensor] | None = None
        self._shape_known = threading.Event()
        self._thread = threading.Thread(target=self._load, name="flash-attn", daemon=True)
        self.error: Exception | None = None

    @property
    def ready(self) -> bool:
        return self._call is not None

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def start(self) -> None:
        """Begin to import it. Call once."""
        self._thread.start()

    def compile(self, num_q_heads: int, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Have it compiled for caches like these, [num_pages, page_size, num_kv_heads, head_dim]; page 0 is read."""
        self._shape = (num_q_heads, k_cache, v_cache)
        self._shape_known.set()

    def compiled_before(self) -> bool:
        """Whether the kernel lies in the disk cache, as far as we know; after `compile`, before `start`."""
        return self._marker().exists()

    def wait(self) -> None:
        """Until it is ready, or cannot be loaded; after `start` and `compile`."""
        self._thread.join()

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, pages: torch.Tensor,
        cu_extend: torch.Tensor, device_len: torch.Tensor, max_extend: int, max_len: int,
    ) -> torch.Tensor:  # fmt: skip
        """Causal attention of E entries' new tokens, [T, num_q_heads, head_dim].

        pages [E, width] int32: page ids. cu_extend [E + 1], device_len [E]: int32; cu_extend begins at 0.
        max_extend, max_len: the largest extend and device_len, on the host.
        """
        if k_cache.shape[1] >= WHOLE_PAGES:
            from worker.kernels.clear_tails import clear_tails  # triton comes with torch for CUDA only

            clear_tails(v_cache, pages, device_len)
        return self._call(
            q, k_cache, v_cache, cu_seqlens_q=cu_extend, seqused_k=device_len, max_seqlen_q=max_extend,
            max_seqlen_k=max_len, page_table=pages, causal=True,
        )[0]  # fmt: skip

    def _load(self) -> None:
        try:
            # Its own switches, read when it is imported: keep compiled kernels on disk, where nobody else writes.
            CACHE_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
            os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(CACHE_DIR))
            from flash_attn.cute import flash_attn_varlen_func

            self._shape_known.wait()
            self._first_call(flash_attn_varlen_func)
            self._marker().touch()
            self._shape = None
            logger.info("prefill attention: FlashAttention-4 is ready")
        except Exception as error:
            self.error = error
            logger.warning("prefill attention stays with the Triton kernel: %s: %s", type(error).__name__, error)

    def _first_call(self, call: Callable[..., object]) -> None:
        """Small calls compile what all calls use. On a stream of its own: steps may be running."""
        num_q_heads, k_cache, v_cache = self._shape
        device, page_size, tokens = k_cache.device, k_cache.shape[1], 8
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream(device)
        with torch.inference_mode(), torch.cuda.stream(stream):
            q = torch.zeros(2 * tokens, num_q_heads, k_cache.shape[3], dtype=k_cache.dtype, device=device)
            ints = {"dtype": torch.int32, "device": device}
            pages = torch.zeros(2, -(-tokens // page_size), **ints)
            cu_extend = torch.tensor([0, tokens, 2 * tokens], **ints)
            lengths = torch.full((2,), tokens, **ints)
            for longest in (tokens, 4096):  # prompts that fit one tile run another kernel than longer ones
                call(
                    q, k_cache, v_cache, cu_seqlens_q=cu_extend, seqused_k=lengths, max_seqlen_q=longest,
                    max_seqlen_k=4096, page_table=pages, causal=True,
                )  # fmt: skip
            stream.synchronize()
        self._call = call

    def _marker(self) -> Path:
        """The file that says that the kernel for this shape and this installation has been compiled into the cache."""
        num_q_heads, k_cache, _ = self._shape
        source = Path(next(iter(importlib.util.find_spec("flash_attn.cute").submodule_search_locations)))
        card = torch.cuda.get_device_capability(k_cache.device)
        key = (
            str(source), source.stat().st_mtime_ns, torch.__version__, card, k_cache.dtype, num_q_heads,
            tuple(k_cache.shape[1:]), k_cache.stride(),
        )  # fmt: skip
        return CACHE_DIR / f"compiled-{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}"
