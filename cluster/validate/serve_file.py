"""Ray Serve configuration files: every key, the application they import, and what its replicas will ask for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from ray.runtime_env import RuntimeEnv
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app
from ray.serve.schema import ServeDeploySchema

from cluster.validate.capacity import Demand, Group
from cluster.validate.engines import ServedEngine, check_engine_override, check_engines, check_tp_sizes, rank_resources
from cluster.validate.models import check_model, kind
from cluster.validate.problems import Problems, nearest
from cluster.validate.source import Path

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")


@dataclass(slots=True)
class ServedApplication:
    """An application of the file that could be built. `engines` are its engine deployments by name: none, if it is not
    ours."""

    path: Path
    engines: dict[str, ServedEngine]
    deployments: dict[str, Any] = field(default_factory=dict)  # Ray's Deployment by name
    overrides: dict[str, tuple[Path, dict[str, Any]]] = field(default_factory=dict)  # from the file, by name


def check_serve(problems: Problems, data: Any) -> list[ServedApplication]:
    """Adds the problems of a Serve file; returns the applications whose demand is known."""
    if not isinstance(data, dict):
        problems.add((), f"must be a mapping, not {kind(data)}")
        return []
    check_model(problems, (), data, ServeDeploySchema)
    for section in ("http_options", "grpc_options"):
        options = data.get(section)
        port = options.get("port", 1) if isinstance(options, dict) else 1
        if isinstance(port, bool) or (isinstance(port, int) and not 1 <= port <= 65535):
            problems.add((section, "port"), f"is no TCP port (1 to 65535): {port!r}")
    applications = data.get("applications")
    found = []
    for index, application in enumerate(applications if isinstance(applications, list) else []):
        if isinstance(application, dict):
            built = _check_application(problems, ("applications", index), application)
            if built is not None:
                found.append(built)
    return found


def demands(application: ServedApplication, has_gpus: bool) -> list[Demand]:
    """What the replicas of an application ask for at most: with autoscaling, all that may exist together."""
    found = []
    for name, deployment in application.deployments.items():
        path, override = application.overrides.get(name, (application.path, {}))
        options = {**(deployment.ray_actor_options or {}), **(override.get("ray_actor_options") or {})}
        bundles = override.get("placement_group_bundles") or deployment._replica_config.placement_group_bundles
        groups = [Group(1, bundle) for bundle in bundles or [_actor_resources(options)] if bundle]
        engine = application.engines.get(name)
        if engine is not None and engine.config.executor == "ray":
            groups.append(Group(engine.config.tp_size, rank_resources(engine.config, has_gpus)))
        default = engine.key("tp_size") if engine is not None else (*application.path, "args", "tp_size")
        replicas, where = _most_replicas(deployment, path, override, default)
        found.append(Demand(name, where, replicas, tuple(groups)))
    return found


def _check_application(problems: Problems, path: Path, application: dict[str, Any]) -> ServedApplication | None:
    for place, environment in _runtime_environments(path, application):
        problems.check_keys(place, environment, RuntimeEnv.known_fields)
    prefix = application.get("route_prefix")
    if isinstance(prefix, str) and (not prefix.startswith("/") or (len(prefix) > 1 and prefix.endswith("/"))):
        problems.add((*path, "route_prefix"), f"must start with / and not end with one (got {prefix!r})")
    overrides = _overrides(problems, path, application)
    target = _import(problems, path, application.get("import_path"))
    args = application.get("args", {})
    if target is None or not isinstance(args, dict):
        return None
    engines = check_engines(problems, (*path, "args"), target, args)
    if engines is None:
        return None
    check_tp_sizes(problems, engines.values())
    try:
        built = build_app(
            call_user_app_builder_with_args_if_necessary(target, args), name=str(application.get("name", "default"))
        )
    except Exception as error:  # the builder is anybody's code
        problems.add((*path, "args"), f"the application cannot be built: {type(error).__name__}: {error}")
        return None
    deployments = {deployment.name: deployment for deployment in built.deployments}
    for name, (place, override) in overrides.items():
        if name not in deployments:
            problems.unknown((*place, "name"), name, deployments, f"the application has no deployment {name!r}")
        elif name in engines:
            check_engine_override(problems, place, override)
    return ServedApplication(path, engines, deployments, overrides)


def _overrides(problems: Problems, path: Path, application: dict[str, Any]) -> dict[str, tuple[Path, dict]]:
    found: dict[str, tuple[Path, dict]] = {}
    entries = application.get("deployments")
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        if not isinstance(entry, dict):
            continue
        place = (*path, "deployments", index)
        name = str(entry.get("name"))
        if name in found:
            problems.add((*place, "name"), f"deployment {name!r} stands twice; Ray takes the last")
        found[name] = (place, entry)
        strategy = entry.get("placement_group_strategy")
        if strategy is not None and strategy not in STRATEGIES:
            where = (*place, "placement_group_strategy")
            problems.unknown(where, strategy, STRATEGIES, f"no such strategy: {strategy!r}")
        bundles = entry.get("placement_group_bundles")
        for number, bundle in enumerate(bundles if isinstance(bundles, list) else []):
            check_resource_names(problems, (*place, "placement_group_bundles", number), bundle)
        options = entry.get("ray_actor_options")
        resources = options.get("resources") if isinstance(options, dict) else None
        if isinstance(resources, dict):
            here = (*place, "ray_actor_options", "resources")
            for name in resources:
                if near := nearest(str(name), ("CPU", "GPU")):
                    problems.add((*here, name), f"is no custom resource; write ray_actor_options.num_{near.lower()}s")
    return found


def check_resource_names(problems: Problems, path: Path, resources: Any) -> None:
    """Custom resources may have any name, but one that is nearly a known one is a mistake."""
    for name in resources if isinstance(resources, dict) else ():
        near = nearest(str(name).rstrip("sS"), RESOURCES)
        if name not in RESOURCES and near is not None:
            problems.add((*path, name), f"is no resource that Ray fills in; did you mean {near}?")


def _import(problems: Problems, path: Path, import_path: Any) -> Any:
    """What import_path names, or None after adding a problem."""
    place = (*path, "import_path")
    if not isinstance(import_path, str) or problems.at_or_below(place):
        return None
    module_name, _, attribute = import_path.replace(":", ".").rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        problems.add(place, f"{import_path!r}: there is no module {error.name}")
        return None
    except Exception as error:  # importing runs anybody's code
        problems.add(place, f"{import_path!r}: importing {module_name} fails: {type(error).__name__}: {error}")
        return None
    target = getattr(module, attribute, None)
    if target is None:
        names = [name for name in {*dir(module), *getattr(module, "__all__", ())} if not name.startswith("_")]
        problems.unknown(place, attribute, names, f"{import_path!r}: {module_name} has no {attribute}")
    elif not isinstance(target, Application) and not callable(target):
        problems.add(place, f"{import_path!r} is neither an application nor a function that makes one")
        target = None
    return target


def _runtime_environments(path: Path, application: dict[str, Any]) -> list[tuple[Path, dict[str, Any]]]:
    found = [((*path, "runtime_env"), application.get("runtime_env"))]
    entries = application.get("deployments")
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        options = entry.get("ray_actor_options") if isinstance(entry, dict) else None
        if isinstance(options, dict):
            found.append(
                ((*path, "deployments", index, "ray_actor_options", "runtime_env"), options.get("runtime_env"))
            )
    return [(place, environment) for place, environment in found if isinstance(environment, dict)]


def _actor_resources(options: dict[str, Any]) -> dict[str, float]:
    named = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus")} | dict(options.get("resources") or {})
    if named["CPU"] is None:
        named["CPU"] = 1.0  # Serve's default
    return {name: float(amount) for name, amount in named.items() if amount}


def _most_replicas(deployment: Any, path: Path, override: dict[str, Any], default: Path) -> tuple[int, Path]:
    """How many replicas may exist at once, and the key that says so: `default` if none does."""
    scaling = override.get("autoscaling_config")
    if isinstance(scaling, dict):
        return scaling.get("max_replicas", 1), (*path, "autoscaling_config", "max_replicas")
    if isinstance(override.get("num_replicas"), int):
        return override["num_replicas"], (*path, "num_replicas")
    if override.get("num_replicas") == "auto":
        return 100, (*path, "num_replicas")  # Ray's default for auto
    scaling = deployment._deployment_config.autoscaling_config
    if scaling is not None:
        return scaling.max_replicas, path
    return deployment.num_replicas or 1, path if path[-2:-1] == ("deployments",) else default
