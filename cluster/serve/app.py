"""The Serve application: an ingress in front of an engine."""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from cluster.config import EngineConfig
from cluster.serve.engine_deployment import EngineDeployment
from cluster.serve.ingress import Ingress

CONTROL_CALLS = 64  # room for status and info calls beside requests
# Seconds beyond drain_timeout until Serve kills a replica. An ingress hears of its end late, and then ends what runs;
# the engine has to last until then.
ENGINE_GRACE, INGRESS_GRACE = 10.0, 20.0


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
    engine = EngineDeployment.options(
        max_ongoing_requests=calls, graceful_shutdown_timeout_s=config.drain_timeout + ENGINE_GRACE
    )
    ingress = Ingress.options(graceful_shutdown_timeout_s=config.drain_timeout + INGRESS_GRACE)
    return ingress.bind(engine.bind(config), config)
