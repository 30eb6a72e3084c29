"""What `EngineConfig` means for the parts: the group of ranks and the scheduler."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import ray

from cluster import autoscaler
from cluster.config import EngineConfig
from cluster.default_model import default_cache_dir
from cluster.errors import ConfigError
from cluster.fake_runner import make_fake_runner
from cluster.flight import FlightRecorder, NoRecorder
from cluster.handshake import GroupInfo
from cluster.inproc_group import cuda_is_available
from cluster.model_files import served_name
from cluster.rank_startup import make_model_runner
from cluster.routing import digest_block
from cluster.worker_group import GroupConfig
from kvcache import PrefixDigest
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler
from worker.config import WorkerConfig

# What fresh workers need to be like those that were recorded.
_RECORDED = (
    "model", "load_format", "tp_size", "device", "dtype", "page_size", "num_pages", "max_running_requests",
    "max_seq_len", "max_step_tokens", "kv_layout", "attention_backend", "gpu_memory_utilization", "gpus_per_rank",
)  # fmt: skip

# What a rank on the device spends its import phase with.
_SPARE_MODULES = {
    "cpu": ("worker.runner",),
    "cuda": ("worker.runner", "worker.attention.triton_backend", "worker.layers.triton_ops"),
    "fake": (),
}


def choose_device(config: EngineConfig, on_ray: bool) -> str:
    """The device that "auto" means: "cuda" if the Ray cluster has a GPU or, without Ray, this machine; else "cpu".

    Raises:
        ConfigError: no node has a GPU, but an autoscaler may add one that has.
    """
    if config.device != "auto":
        return config.device
    if not on_ray:
        return "cuda" if cuda_is_available() else "cpu"
    if ray.cluster_resources().get("GPU", 0):
        return "cuda"
    if autoscaler.adds_nodes():
        raise ConfigError(
            "device auto: no node of this cluster has a GPU yet, but its autoscaler may add one; say cuda or cpu"
        )
    return "cpu"


def group_config(config: EngineConfig, model_path: Path, device: str, may_grow: bool) -> GroupConfig:
    """Settings of the group. `device` is "cpu", "cuda" or "fake"; `may_grow`: nodes can join the cluster.

    Ranks that share a card use gloo, since NCCL wants a card for each; gloo's collectives run on the host, so their
    steps are not captured into graphs.
    """
    share = config.gpus_per_rank
    shares_card = device == "cuda" and share < 1
    worker = WorkerConfig(
        model_path=str(model_path),
        load_format=config.load_format,
        tp_size=config.tp_size,
        device="cuda" if device == "cuda" else "cpu",
        dtype=config.dtype,
        page_size=config.page_size,
        num_pages=config.num_pages,
        max_running_requests=config.max_running_requests,
        max_seq_len=config.max_seq_len,
        max_step_tokens=config.max_step_tokens,
        kv_layout=config.kv_layout,
        attention_backend=config.attention_backend,
        memory_utilization=config.gpu_memory_utilization * (share if shares_card else 1.0),
        use_graphs=not (shares_card and config.tp_size > 1),
    )
    return GroupConfig(
        worker=worker,
        resources={"GPU": share} if device == "cuda" else {"CPU": 1.0},
        backend="nccl" if device == "cuda" and not shares_card else "gloo",
        placement_timeout=config.placement_timeout,
        start_timeout=config.start_timeout,
        step_timeout=config.step_timeout,
        may_grow=may_grow,
        make_runner=partial(make_fake_runner, tokens_per_s=config.fake_tokens_per_s)
        if device == "fake"
        else make_model_runner,
        spare_modules=_SPARE_MODULES[device] if config.spare_ranks and config.max_recoveries else None,
    )


def scheduler_config(config: EngineConfig, group: GroupInfo, eos_token_ids: tuple[int, ...]) -> SchedulerConfig:
    """Settings of the scheduler, once the ranks have said what they hold. Raises ConfigError."""
    try:
        return SchedulerConfig(
            num_pages=group.num_pages,
            page_size=config.page_size,
            max_running_requests=config.max_running_requests,
            max_seq_len=group.max_seq_len,
            max_step_tokens=config.max_step_tokens,
            cache_type=config.cache_type,
            overlap_depth=config.overlap_depth,
            policy=config.policy,
            eos_token_ids=eos_token_ids,
            pad_sizes=group.graph_sizes,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def effective_config(config: EngineConfig, model_path: Path, device: str, group: GroupInfo) -> EngineConfig:
    """`config` with nothing left open that was derived at start-up."""
    derived = {
        "model": str(model_path),
        "served_model_name": config.served_model_name or served_name(config.model),
        "device": device,
        "dtype": group.dtype,
        "num_pages": group.num_pages,
        "max_seq_len": group.max_seq_len,
    }
    return config.model_copy(update=derived)


def flight_recorder(config: EngineConfig, scheduler: Scheduler) -> FlightRecorder | NoRecorder:
    """The recorder that the effective settings ask for."""
    if not config.flight_steps:
        return NoRecorder()
    directory = Path(config.flight_dir).expanduser() if config.flight_dir else default_cache_dir() / "flight"
    engine = {name: getattr(config, name) for name in _RECORDED}
    return FlightRecorder(scheduler, config.flight_steps, config.record_tokens, engine, directory)


def make_digest(config: EngineConfig) -> PrefixDigest | None:
    """The digest that a cache-aware router needs; None where nobody would read it."""
    if config.router != "cache_aware" or config.cache_type != "radix":
        return None
    return PrefixDigest(digest_block(config.page_size), config.router_digest_size)
