"""Fresh workers for a replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from cluster import ray_runtime
from cluster.config import EngineConfig
from cluster.fake_runner import FakeRunner
from cluster.inproc_group import InprocGroup
from cluster.model_files import resolve_model
from cluster.progress import Progress
from cluster.settings import group_config
from cluster.timeline import Timeline
from cluster.worker_group import WorkerGroup


@contextmanager
def fresh_workers(config: EngineConfig, progress: Progress) -> Iterator[WorkerGroup | InprocGroup]:
    """A started group of these settings: one rank in this process, or several as Ray actors.

    Raises:
        ConfigError, ModelLoadError, StartupError, PlacementError: as `Engine.start`.
    """
    path = resolve_model(config.model, progress, config.cache_dir, config.load_format == "dummy")
    runtime = ray_runtime.connect(config.ray_address, config.tp_size) if config.tp_size > 1 else None
    try:
        may_grow = runtime is not None and runtime.may_grow
        settings = replace(group_config(config, path, config.device, may_grow), spare_modules=None)
        fake = FakeRunner(settings.worker) if config.device == "fake" else None
        group = WorkerGroup(settings) if runtime else InprocGroup(settings.worker, fake)
        try:
            group.start(Timeline(progress))
            yield group
        finally:
            group.stop()
    finally:
        if runtime is not None:
            runtime.close()
