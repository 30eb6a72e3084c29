"""The Serve application: an ingress in front of an engine, or of several."""

from __future__ import annotations

from typing import Any

from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster.config import EngineConfig
from cluster.errors import ConfigError
from cluster.model_files import served_name
from cluster.serve.engine_deployment import EngineDeployment
from cluster.serve.ingress import Ingress

ENGINE = EngineDeployment.name
ROUTER = "cluster.serve.router.CacheAwareRouter"
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
    return make_app(args if isinstance(args, EngineConfig) else EngineConfig.parse(args))


def build_models_app(args: dict[str, Any]) -> Application:
    """Several models behind one address: the `model` of a request says which.

    Args:
        args: `models`, a list of `EngineConfig`s by their fields; what else stands in `args` holds for all of them.

    Raises:
        ConfigError: an unknown setting or a value outside its limits, or two models of one name.
    """
    configs = engine_configs(args)
    engines = [engine_app(config, {"name": name}) for name, config in configs.items()]
    return ingress_app(engines, list(configs.values()), {})


def engine_configs(args: dict[str, Any]) -> dict[str, EngineConfig]:
    """The engine deployments of `build_models_app` by name, in the order of `models`. Raises ConfigError."""
    entries = args.get("models")
    if not (isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries)):
        raise ConfigError("models: must be a list of settings, one mapping for each model")
    common = {name: value for name, value in args.items() if name != "models"}
    configs = [EngineConfig.parse(common | entry) for entry in entries]
    names = [config.served_model_name or served_name(config.model) for config in configs]
    found = {f"{ENGINE}-{name.replace('/', '-')}": config for name, config in zip(names, configs, strict=True)}
    if len(found) < len(names):
        raise ConfigError(f"models: two have one name ({', '.join(names)}); set served_model_name")
    return found


def make_app(
    config: EngineConfig, engine: dict[str, Any] | None = None, ingress: dict[str, Any] | None = None
) -> Application:
    """`build_openai_app` with Serve's options for the deployments: `num_replicas`, `autoscaling_config` and such."""
    return ingress_app([engine_app(config, engine or {})], [config], ingress or {})


def engine_app(config: EngineConfig, options: dict[str, Any]) -> Application:
    """The engine deployment of one model."""
    # Every request is an open call. The engine refuses what exceeds its queue, with a Retry-After; Serve must not
    # hold requests back before it does.
    calls = 2 * (config.max_running_requests + config.max_queued_requests) + CONTROL_CALLS
    ours = {"max_ongoing_requests": calls, "graceful_shutdown_timeout_s": config.drain_timeout + ENGINE_GRACE}
    if config.router == "cache_aware":
        ours["request_router_config"] = RequestRouterConfig(request_router_class=ROUTER)
    return EngineDeployment.options(**ours | options).bind(config)


def ingress_app(engines: list[Application], configs: list[EngineConfig], options: dict[str, Any]) -> Application:
    """The ingress in front of engines, one for each config."""
    ours = {"graceful_shutdown_timeout_s": configs[0].drain_timeout + INGRESS_GRACE}
    return Ingress.options(**ours | options).bind(engines, configs)
