"""Files of `ray up`: Ray's own schema and preparation, and the mistakes that both of them let through."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import re
import shlex
from pathlib import Path as FilePath
from typing import Any

import jsonschema
import ray
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.validate.capacity import Nodes, NodeType
from cluster.validate.machines import (
    AZURE_PARAMETERS,
    MACHINE_TYPE_KEY,
    MACHINES,
    NODE_CONFIG_KEYS,
    PROVIDER_KEYS,
    PROVIDER_REQUIRED,
)
from cluster.validate.models import kind, mentioned
from cluster.validate.problems import Problems, suggest
from cluster.validate.serve_file import check_resource_names
from cluster.validate.source import Path

_COMMAND_KEYS = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
                 "head_start_ray_commands", "worker_start_ray_commands")  # fmt: skip
_RAY_PIN = re.compile(r"\bray(?:\[[\w,]+\])?==([\w.]+)")
_MAX_NODES = 10_000


def check_cluster(problems: Problems, data: Any) -> Nodes | None:
    """Adds the problems of a cluster file; returns the nodes it allows, None if they cannot be known."""
    if not isinstance(data, dict):
        problems.add((), f"must be a mapping, not {kind(data)}")
        return None
    schema = json.loads((FilePath(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    provider = data.get("provider") if isinstance(data.get("provider"), dict) else {}
    is_local = provider.get("type") == "local"
    _check_known_keys(problems, data, schema, is_local)
    plain = {key: value for key, value in data.items() if not (is_local and key == "min_workers")}
    _check_schema(problems, plain, schema)
    if problems:
        return None  # what follows relies on the types
    _check_provider(problems, provider)
    types, head = data.get("available_node_types"), data.get("head_node_type")
    if isinstance(types, dict) and not is_local and head not in types:
        problems.unknown(("head_node_type",), head, types, f"must be one of available_node_types, not {head!r}")
    if problems:
        return None
    _check_prepared(problems, data, schema)
    if problems:
        return None
    _check_limits(problems, data)
    _check_files_and_commands(problems, data)
    return _local_nodes(problems, data) if is_local else _cloud_nodes(problems, data)


def _check_known_keys(problems: Problems, data: dict[str, Any], schema: dict[str, Any], is_local: bool) -> None:
    top = schema["properties"]
    problems.check_keys((), data, [*top, "min_workers"] if is_local else list(top))
    for section in ("auth", "docker"):
        if isinstance(data.get(section), dict):
            problems.check_keys((section,), data[section], top[section]["properties"])
    types = data.get("available_node_types")
    node_type = next(iter(top["available_node_types"]["patternProperties"].values()))["properties"]
    for name, entry in (types if isinstance(types, dict) else {}).items():
        if isinstance(entry, dict):
            path = ("available_node_types", name)
            problems.check_keys(path, entry, node_type)
            check_resource_names(problems, (*path, "resources"), entry.get("resources"))
            _check_node_config(problems, path, entry, _provider_type(data))


def _check_node_config(problems: Problems, path: Path, entry: dict[str, Any], provider: str) -> None:
    config = entry.get("node_config")
    if not isinstance(config, dict) or provider not in NODE_CONFIG_KEYS:
        return
    path = (*path, "node_config")
    problems.check_keys(path, config, NODE_CONFIG_KEYS[provider])
    parameters = config.get("azure_arm_parameters")
    if isinstance(parameters, dict):
        problems.check_keys((*path, "azure_arm_parameters"), parameters, AZURE_PARAMETERS)
    machine, place = _machine_type(config, path, provider)
    if machine is None:
        problems.add(place, "is required: the machine type of these nodes")
        return
    known, written = MACHINES.get(machine), entry.get("resources")
    if known is None or not isinstance(written, dict):
        return
    for name, amount in zip(("CPU", "GPU"), known, strict=True):
        if isinstance(written.get(name), int) and written[name] > amount:
            problems.add((*path[:-1], "resources", name), f"{machine} has {amount} {name}, not {written[name]}")


def _machine_type(config: dict[str, Any], path: Path, provider: str) -> tuple[str | None, Path]:
    value: Any = config
    for key in MACHINE_TYPE_KEY[provider]:
        path = (*path, key)
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None, path


def _check_schema(problems: Problems, data: dict[str, Any], schema: dict[str, Any]) -> None:
    for error in jsonschema.Draft7Validator(schema).iter_errors(data):
        path = tuple(error.absolute_path)
        if error.validator == "additionalProperties":
            continue  # reported with the nearest key already
        if error.validator == "required":
            for name in error.validator_value:
                if name not in error.instance:
                    problems.add((*path, name), "is required here")
        elif not problems.at_or_below(path):
            problems.add(path, error.message)


def _check_provider(problems: Problems, provider: dict[str, Any]) -> None:
    name = provider.get("type")
    if name not in PROVIDER_KEYS:
        if name is not None:
            problems.unknown(("provider", "type"), name, PROVIDER_KEYS, f"provider {name!r} is not supported here")
        return
    problems.check_keys(("provider",), provider, PROVIDER_KEYS[name])
    if "coordinator_address" not in provider:
        for key in PROVIDER_REQUIRED[name]:
            if provider.get(key) in (None, "", []):
                problems.add(("provider", key), f"is required for provider {name}")
    region, zones = provider.get("region"), provider.get("availability_zone")
    if name in ("aws", "gcp") and isinstance(region, str) and isinstance(zones, str):
        for zone in zones.split(","):
            if not zone.strip().startswith(region):
                problems.add(("provider", "availability_zone"), f"zone {zone.strip()} is not in region {region}")
    addresses = [str(address) for address in (provider.get("head_ip"), *(provider.get("worker_ips") or ()))]
    if name == "local" and len(set(addresses)) < len(addresses):
        problems.add(("provider", "worker_ips"), "an address stands twice, or is head_ip")


def _check_prepared(problems: Problems, data: dict[str, Any], schema: dict[str, Any]) -> None:
    """What Ray itself says, after it filled in its defaults."""
    output = io.StringIO()
    level = logging.getLogger("ray").level
    try:
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            prepared = prepare_config(copy.deepcopy(data))
            _check_schema(problems, prepared, schema)
            if not problems:
                validate_config(prepared)
    except Exception as error:  # prepare_config asserts, and ends commands with click's exceptions
        message = str(error) or output.getvalue().strip() or type(error).__name__
        problems.add(mentioned((), data, message), f"Ray refuses it: {message}")
    finally:
        logging.getLogger("ray").setLevel(level)


def _check_limits(problems: Problems, data: dict[str, Any]) -> None:
    if data.get("upscaling_speed") == 0:
        problems.add(("upscaling_speed",), "0 never adds a node")
    types = data.get("available_node_types") or {}
    for name, entry in types.items():
        least, most = entry.get("min_workers", 0), entry.get("max_workers", _MAX_NODES)
        for key in ("min_workers", "max_workers"):
            if entry.get(key, 0) < 0:
                problems.add(("available_node_types", name, key), f"must not be negative (got {entry[key]})")
        if least > most:
            problems.add(("available_node_types", name, "min_workers"), f"{least} is more than max_workers, {most}")


def _check_files_and_commands(problems: Problems, data: dict[str, Any]) -> None:
    for remote, local in (data.get("file_mounts") or {}).items():
        if not FilePath(str(local)).expanduser().exists():
            problems.add(
                ("file_mounts", remote), f"{local} does not exist, seen from this directory; `ray up` reads it here too"
            )
    if _provider_type(data) != "local" and not data.get("setup_commands"):
        problems.add(("setup_commands",), "is required: Ray's default installs a nightly build of Ray, and not raydix")
    for key in _COMMAND_KEYS:
        for index, command in enumerate(data.get(key) or ()):
            pinned = _RAY_PIN.search(command)
            if pinned and pinned[1] != ray.__version__:
                problems.add(
                    (key, index),
                    f"installs Ray {pinned[1]}; raydix runs with {ray.__version__} (requirements.txt)",
                )
    head = _check_start(problems, data, "head_start_ray_commands", {"head": None, "autoscaling-config": None})
    worker = _check_start(problems, data, "worker_start_ray_commands", {"address": "$RAY_HEAD_IP"})
    port = (head or {}).get("port") or "6379"
    address = (worker or {}).get("address") or ""
    if head and worker and ":" in address and address.rpartition(":")[2] != port:
        problems.add(
            ("worker_start_ray_commands",), f"workers look for the head at {address}, but it listens on port {port}"
        )


def _check_start(
    problems: Problems, data: dict[str, Any], key: str, needed: dict[str, str | None]
) -> dict[str, str | None] | None:
    """The options of `ray start` among the commands of `key`; None if there is none to look at."""
    commands = data.get(key)
    if not commands:
        return None  # Ray's default
    for index, command in enumerate(commands):
        match = re.search(r"\bray start\b(.*)", command, re.DOTALL)
        if not match:
            continue
        options = _options(match[1])
        known = ray_start_options()
        for name in options:
            if name not in known:
                problems.add((key, index), f"`ray start` has no option --{name}{suggest(name, known)}")
        for name, value in needed.items():
            if name not in options:
                problems.add((key, index), f"`ray start` needs --{name} here")
            elif value and value not in (options[name] or ""):
                problems.add((key, index), f"--{name} must be {value}:PORT; only then do the nodes find the head node")
        return options
    problems.add((key,), "no command among them is `ray start`")
    return None


def _options(text: str) -> dict[str, str | None]:
    """The --options of a command line."""
    found: dict[str, str | None] = {}
    words = re.split(r"[;&|]", text)[0]
    parts = shlex.split(words)
    for index, part in enumerate(parts):
        if part.startswith("--"):
            name, _, value = part[2:].partition("=")
            following = parts[index + 1] if index + 1 < len(parts) else ""
            found[name] = value or (following if following and not following.startswith("-") else None)
    return found


def ray_start_options() -> set[str]:
    """The long options of `ray start` in the installed version, without dashes."""
    from ray.scripts.scripts import start

    return {option.lstrip("-") for parameter in start.params for option in parameter.opts if option.startswith("--")}


def _cloud_nodes(problems: Problems, data: dict[str, Any]) -> Nodes | None:
    types, head = data.get("available_node_types") or {}, data.get("head_node_type")
    if not types:
        return None
    limit = data.get("max_workers", 2)  # Ray's default
    found = []
    for name, entry in types.items():
        is_head = name == head
        least = entry.get("min_workers", 0) + is_head
        most = entry.get("max_workers", 0 if is_head else limit) + is_head
        found.append(NodeType(name, _resources(entry, _provider_type(data)), least, most))
    return Nodes(tuple(found), limit + 1)


def _resources(entry: dict[str, Any], provider: str) -> dict[str, float] | None:
    written = {name: float(amount) for name, amount in (entry.get("resources") or {}).items()}
    machine, _ = _machine_type(entry.get("node_config") or {}, (), provider)
    known = MACHINES.get(machine or "")
    if known is not None:
        return {"CPU": float(known[0]), "GPU": float(known[1])} | written
    return written or None


def _local_nodes(problems: Problems, data: dict[str, Any]) -> Nodes | None:
    """On-premise hosts have no statement of resources that Ray reads; ours is in `metadata`, which Ray leaves alone."""
    ours = (data.get("metadata") or {}).get("raydix")
    if ours is None:
        return None
    path = ("metadata", "raydix")
    if not isinstance(ours, dict):
        problems.add(path, f"must be a mapping, not {kind(ours)}")
        return None
    problems.check_keys(path, ours, ("host_resources",))
    resources = ours.get("host_resources")
    if not isinstance(resources, dict):
        problems.add((*path, "host_resources"), "is required here: what each host has, such as {CPU: 32, GPU: 8}")
        return None
    check_resource_names(problems, (*path, "host_resources"), resources)
    for name, amount in resources.items():
        if isinstance(amount, bool) or not isinstance(amount, (int, float)) or amount < 0:
            problems.add((*path, "host_resources", name), f"must be a number, not {amount!r}")
    if problems:
        return None
    hosts = 1 + min(len(data["provider"].get("worker_ips") or ()), data.get("max_workers", _MAX_NODES))
    return Nodes((NodeType("host", {name: float(n) for name, n in resources.items()}, hosts, hosts),), hosts)


def unknown_types(nodes: Nodes) -> list[str]:
    """Node types whose resources the file does not tell."""
    return [each.name for each in nodes.types if each.resources is None and each.most]


def _provider_type(data: dict[str, Any]) -> str:
    provider = data.get("provider")
    return str(provider.get("type")) if isinstance(provider, dict) else ""
