"""The Serve application: an ingress in front of an engine."""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from cluster.config import EngineConfig
from cluster.serve.engine_deployment import EngineDeployment
from cluster.serve.ingress import Ingress

CONTROL_CALLS = 64  # room for status and info calls beside requests


def build_openai_app(args: dict[str, Any] | EngineConfig) -> Application:
    """An OpenAI-compatible server, for `serve run cluster.serve:build_openai_app model=...` and config files.

    Args:
        args: `EngineConfig`, or its fields by name.

    Raises:
        ConfigError: an unknown setting or a value outside its limits.
    """
    config = args if isinstance(args, EngineConfig) else EngineConfig.parse(args)
    # Every request is an open call. The engine refuses what exceeds its queue, with a Retry-After; Serve must not
    # hold requests back before it does.
    calls = 2 * (config.max_running_requests + config.max_queued_requests) + CONTROL_CALLS
    return Ingress.bind(EngineDeployment.options(max_ongoing_requests=calls).bind(config), config)
