"""Our engines in a Serve file: the settings of each engine deployment, and what goes wrong with them on a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from tempfile import TemporaryDirectory
from typing import Any

from cluster.config import EngineConfig
from cluster.errors import ConfigError
from cluster.presets import preset_of, write_preset
from cluster.serve import build_models_app, build_openai_app
from cluster.serve.app import ENGINE, engine_configs
from cluster.settings import group_config
from cluster.validate.capacity import Nodes
from cluster.validate.models import check_model
from cluster.validate.problems import Problems
from cluster.validate.source import Path
from worker.errors import ModelError
from worker.model_config import ModelConfig, check_tp_size

SHORTEST_NODE_START = 60.0  # seconds; no cloud starts a GPU node faster

# What other engines call our settings.
ALIASES = {
    "tensor_parallel_size": "tp_size", "tp": "tp_size", "max_model_len": "max_seq_len", "block_size": "page_size",
    "max_num_seqs": "max_running_requests", "max_num_batched_tokens": "max_step_tokens", "model_path": "model",
    "context_length": "max_seq_len", "mem_fraction_static": "gpu_memory_utilization", "num_gpu_blocks": "num_pages",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """The settings of one engine deployment. They stand at `path`; those that several share stand in `shared`, at
    `shared_path`."""

    config: EngineConfig
    path: Path
    shared: dict[str, Any] = field(default_factory=dict)
    shared_path: Path = ()

    def key(self, setting: str) -> Path:
        return (*(self.shared_path if setting in self.shared else self.path), setting)


def check_engines(problems: Problems, path: Path, target: Any, args: dict[str, Any]) -> dict[str, ServedEngine] | None:
    """The engine deployments that the builder `target` makes of `args`, which stand at `path`: none, if it is not ours.
    None after adding a problem."""
    if target is build_openai_app:
        return _one_engine(problems, path, args)
    if target is build_models_app:
        return _several_engines(problems, path, args)
    return {}


def rank_resources(config: EngineConfig, has_gpus: bool) -> dict[str, float]:
    """One rank's bundle, as `Engine` will ask for it."""
    on_gpu = config.device == "cuda" or (config.device == "auto" and has_gpus)
    return group_config(config, FilePath(), "cuda" if on_gpu else "cpu", may_grow=True).resources


def check_tp_sizes(problems: Problems, engines: Iterable[ServedEngine]) -> None:
    """A tp_size that the model will refuse, where its shape is known without its checkpoint."""
    for engine in engines:
        config = engine.config
        preset = preset_of(config.model, config.load_format == "dummy")
        if preset is None or config.device == "fake":  # fake ranks hold nothing that has to be divided
            continue
        with TemporaryDirectory() as directory:
            model = ModelConfig.from_pretrained(write_preset(preset, FilePath(directory)))
        try:
            check_tp_size(model, config.tp_size)
        except ModelError as error:
            problems.add(engine.key("tp_size"), f"{preset}: {error}")


def check_growth(problems: Problems, engines: Iterable[ServedEngine], nodes: Nodes) -> None:
    """Settings that go wrong where GPU nodes are started on demand."""
    for engine in engines:
        config = engine.config
        if not nodes.has_gpus or config.device in ("cpu", "fake") or nodes.gpus_present >= config.tp_size:
            continue
        if config.device == "auto":
            problems.add(
                engine.key("device"),
                "auto means cpu as long as no GPU node has joined, and in this cluster they join on demand; write cuda",
            )
        if config.placement_timeout < SHORTEST_NODE_START:
            problems.add(
                engine.key("placement_timeout"),
                f"{config.placement_timeout:g} s are over before a GPU node has started on demand; give it minutes "
                "(900)",
            )


def check_engine_override(problems: Problems, path: Path, override: dict[str, Any]) -> None:
    """What an engine replica must be left alone with: it is a driver without a GPU and places its ranks itself."""
    if override.get("placement_group_bundles"):
        problems.add(
            (*path, "placement_group_bundles"),
            "the engine places its ranks itself, from tp_size and gpus_per_rank in args; these would stay empty",
        )
    if (override.get("ray_actor_options") or {}).get("num_gpus"):
        problems.add(
            (*path, "ray_actor_options", "num_gpus"),
            "a driver uses no GPU, this one would be lost to the ranks; theirs are tp_size and gpus_per_rank in args",
        )


def _one_engine(problems: Problems, path: Path, args: dict[str, Any]) -> dict[str, ServedEngine] | None:
    _check_settings(problems, path, args)
    return None if problems.at_or_below(path) else {ENGINE: ServedEngine(EngineConfig(**args), path)}


def _several_engines(problems: Problems, path: Path, args: dict[str, Any]) -> dict[str, ServedEngine] | None:
    entries = args.get("models")
    shared = {name: value for name, value in args.items() if name != "models"}
    _check_settings(problems, path, shared)
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        if isinstance(entry, dict):
            _check_settings(problems, (*path, "models", index), entry)
    if problems.at_or_below(path):
        return None
    try:
        configs = engine_configs(args)
    except ConfigError as error:  # of both parts together
        problems.add((*path, "models"), str(error).removeprefix("models: "))
        return None
    return {
        name: ServedEngine(
            config,
            (*path, "models", index),
            {key: value for key, value in shared.items() if key not in entries[index]},
            path,
        )
        for index, (name, config) in enumerate(configs.items())
    }


def _check_settings(problems: Problems, path: Path, args: dict[str, Any]) -> None:
    for name in args:
        if name in ALIASES and name not in EngineConfig.model_fields:
            problems.add((*path, name), f"unknown key; it is called {ALIASES[name]} here")
    check_model(problems, path, args, EngineConfig)
