"""`WorkerConfig`: what one rank needs to know, as plain values that travel in an actor's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class WorkerConfig:
    """Settings of one rank. The driver derives them from its own configuration; nothing here is checked twice.

    model_path            local directory of a Hugging Face checkpoint
    load_format           "dummy" fills the weights with random numbers (benchmarks)
    device                "cuda" means the one card this process sees as `device_index`
    dtype                 of weights, activations and the KV pool; "auto": float32 on cpu, the checkpoint's on cuda
    num_pages             usable KV pages; None: the minimum of every rank's `ModelRunner.max_pages()`
    pages_fitted          `num_pages` is what this group's ranks found at an earlier start: it is not measured again
    max_seq_len           tokens per request, prompt and output; None: the model's limit
    max_step_tokens       largest number of input tokens in one step
    memory_utilization    share of the card's memory this rank may use (CUDA)
    cpu_memory_share      share of the machine's available memory that the ranks on it take for KV pages (CPU)
    local_ranks           ranks of the group on this machine, which divide that share
    attention_backend     name in the attention registry; "auto": the best one for the device
    use_graphs            capture decode steps and small steps with prefills into CUDA graphs
    """

    model_path: str
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    tp_size: int = 1
    tp_rank: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    device_index: int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    page_size: int = 16
    num_pages: int | None = None
    pages_fitted: bool = False
    max_running_requests: int = 256
    max_seq_len: int | None = None
    max_step_tokens: int = 2048
    kv_layout: Literal["layer_first", "page_first"] = "layer_first"
    memory_utilization: float = 0.9
    cpu_memory_share: float = 0.25
    local_ranks: int = 1
    attention_backend: Literal["auto", "torch", "triton", "flash"] = "auto"
    use_graphs: bool = True
