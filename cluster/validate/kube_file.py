"""Kubernetes files with RayService and RayCluster objects."""

from __future__ import annotations

import re
from typing import Any

import ray

from cluster.errors import ConfigError
from cluster.validate.capacity import Nodes, NodeType
from cluster.validate.cluster_file import ray_start_options
from cluster.validate.kube_schema import SHAPES, check_shape
from cluster.validate.problems import Problems, check_text, nearest
from cluster.validate.serve_file import ServedApplication, check_serve
from cluster.validate.source import Path

API_VERSION = "ray.io/v1"
GPU = "nvidia.com/gpu"
_SUFFIXES = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "Ki": 2.0**10, "Mi": 2.0**20,
             "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}  # fmt: skip
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([A-Za-z]*)")
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_RESOURCES = ("cpu", "memory", "ephemeral-storage", GPU)
UPSCALING_MODES = ("Default", "Aggressive", "Conservative")
_ADDED_BY_KUBERAY = {"block"}  # rayStartParams that are no options of the installed `ray start`, but KubeRay sets


def check_kubernetes(problems: Problems, data: Any) -> tuple[Nodes | None, list[ServedApplication], Problems | None]:
    """Adds the problems of one Kubernetes object.

    Returns:
        The nodes its cluster can have; the applications in serveConfigV2; the problems of serveConfigV2, whose lines
        are those of the file. Objects that are not Ray's are left alone.
    """
    name = data.get("kind")
    if name not in SHAPES:
        near = nearest(str(name), SHAPES)
        if near is not None or "ray.io" in str(data.get("apiVersion")):
            problems.unknown(("kind",), name, SHAPES, f"no such kind: {name!r}")
        return None, [], None
    if data.get("apiVersion") != API_VERSION:
        problems.add(("apiVersion",), f"must be {API_VERSION}, not {data.get('apiVersion')}")
    check_shape(problems, (), data, SHAPES[name])
    label = (data.get("metadata") or {}).get("name") if isinstance(data.get("metadata"), dict) else None
    if isinstance(label, str) and not _DNS_NAME.fullmatch(label):
        problems.add(("metadata", "name"), f"{label!r}: only lower-case letters, digits and - in the middle")
    spec = data.get("spec")
    if not isinstance(spec, dict):
        return None, [], None
    inner, applications = None, []
    shaped = not problems
    if name == "RayService":
        if isinstance(spec.get("serveConfigV2"), str):
            inner, applications = _check_serve_text(problems)
        place, cluster = ("spec", "rayClusterConfig"), spec.get("rayClusterConfig")
    else:
        place, cluster = ("spec",), spec
    nodes = _check_cluster(problems, place, cluster) if shaped else None  # relies on the types
    return nodes, applications, inner


def _check_serve_text(problems: Problems) -> tuple[Problems | None, list[ServedApplication]]:
    path = ("spec", "serveConfigV2")
    try:
        source = problems.source.nested(path)
    except ConfigError as error:
        problems.add(path, str(error).partition(": ")[2])
        return None, []
    inner = Problems(source)
    check_text(inner)
    return inner, [] if source.odd_keys else check_serve(inner, source.data)


def _check_cluster(problems: Problems, path: Path, spec: dict[str, Any]) -> Nodes | None:
    version = spec.get("rayVersion")
    if isinstance(version, str) and version != ray.__version__:
        problems.add((*path, "rayVersion"), f"{version}: raydix runs with Ray {ray.__version__} (requirements.txt)")
    options = spec.get("autoscalerOptions")
    if isinstance(options, dict):
        mode = options.get("upscalingMode", "Default")
        if mode not in UPSCALING_MODES:
            problems.unknown(
                (*path, "autoscalerOptions", "upscalingMode"), mode, UPSCALING_MODES, f"no such mode: {mode!r}"
            )
        if not spec.get("enableInTreeAutoscaling"):
            problems.add((*path, "autoscalerOptions"), "has no effect without enableInTreeAutoscaling: true")
    scales = bool(spec.get("enableInTreeAutoscaling"))
    types = []
    head = spec.get("headGroupSpec")
    if isinstance(head, dict):
        types.append(NodeType("head", _check_group(problems, (*path, "headGroupSpec"), head), 1, 1))
    groups = spec.get("workerGroupSpecs")
    seen: set[Any] = set()
    for index, group in enumerate(groups if isinstance(groups, list) else []):
        if not isinstance(group, dict):
            continue
        here = (*path, "workerGroupSpecs", index)
        name = group.get("groupName")
        if name in seen:
            problems.add((*here, "groupName"), f"{name!r} stands twice")
        seen.add(name)
        least, now, most = _check_replicas(problems, here, group)
        resources = _check_group(problems, here, group)
        hosts = group.get("numOfHosts", 1) if isinstance(group.get("numOfHosts", 1), int) else 1
        there = (max(least, now) if not scales else least) * hosts
        types.append(NodeType(str(name), resources, there, (most if scales else max(least, now)) * hosts))
    if problems:
        return None
    return Nodes(tuple(types), sum(each.most for each in types))


def _check_replicas(problems: Problems, path: Path, group: dict[str, Any]) -> tuple[int, int, int]:
    least, most = group.get("minReplicas", 0), group.get("maxReplicas", 0)
    now = group.get("replicas", least)
    if not all(isinstance(each, int) for each in (least, now, most)):
        return 0, 0, 0
    if not 0 <= least <= most:
        problems.add((*path, "minReplicas"), f"minReplicas ({least}) must be between 0 and maxReplicas ({most})")
    elif not least <= now <= most:
        problems.add((*path, "replicas"), f"replicas ({now}) must be between minReplicas and maxReplicas")
    return least, now, most


def _check_group(problems: Problems, path: Path, group: dict[str, Any]) -> dict[str, float] | None:
    """Checks a group's pod; returns what Ray will see in it."""
    parameters = group.get("rayStartParams")
    parameters = parameters if isinstance(parameters, dict) else {}
    known = ray_start_options() | _ADDED_BY_KUBERAY
    problems.check_keys((*path, "rayStartParams"), parameters, known)
    template = group.get("template")
    pod = template.get("spec") if isinstance(template, dict) else None
    containers = pod.get("containers") if isinstance(pod, dict) else None
    if not isinstance(containers, list) or not containers or not isinstance(containers[0], dict):
        return None
    place = (*path, "template", "spec")
    _check_volumes(problems, place, pod)
    limits = _check_resources(problems, (*place, "containers", 0, "resources"), containers[0].get("resources"))
    if limits.get(GPU, 0) > 1:
        _check_shared_memory(problems, place, pod)
    resources = {"CPU": float(-(-limits.get("cpu", 0) // 1)), "GPU": limits.get(GPU, 0.0)}
    for name, option in (("CPU", "num-cpus"), ("GPU", "num-gpus")):
        if option in parameters:
            try:
                resources[name] = float(parameters[option])
            except (TypeError, ValueError):
                problems.add((*path, "rayStartParams", option), f"is no number: {parameters[option]!r}")
    return resources


def _check_resources(problems: Problems, path: Path, resources: Any) -> dict[str, float]:
    """The limits of a container as numbers, after checking them against its requests."""
    found: dict[str, dict[str, float]] = {"limits": {}, "requests": {}}
    if not isinstance(resources, dict):
        problems.add(path, "is required: without limits Ray sees the whole machine, and every pod on it does")
        return {}
    for side, amounts in found.items():
        for name, text in (resources.get(side) or {}).items():
            here = (*path, side, name)
            near = nearest(str(name), _RESOURCES)
            if near is not None and name not in _RESOURCES:
                problems.add(here, f"no such resource; did you mean {near}?")
                continue
            amount = parse_quantity(text)
            if amount is None:
                problems.add(here, f"is no quantity: {text!r} (such as 8, 500m, 64Gi)")
            else:
                amounts[name] = amount
    for name, amount in found["requests"].items():
        if name not in found["limits"]:
            if name == GPU:
                problems.add((*path, "requests", name), "GPUs need a limit, equal to the request")
        elif amount > found["limits"][name] or (name == GPU and amount != found["limits"][name]):
            relation = "differs from" if name == GPU else "is above"
            problems.add((*path, "requests", name), f"the request {relation} the limit; Kubernetes refuses it")
    if "cpu" not in found["limits"] and not problems.at_or_below(path):
        problems.add((*path, "limits", "cpu"), "is required: KubeRay tells Ray the pod's CPUs from it")
    return found["limits"]


def _check_volumes(problems: Problems, path: Path, pod: dict[str, Any]) -> None:
    volumes = pod.get("volumes")
    names = {
        volume.get("name") for volume in (volumes if isinstance(volumes, list) else []) if isinstance(volume, dict)
    }
    for index, container in enumerate(pod["containers"]):
        mounts = container.get("volumeMounts") if isinstance(container, dict) else None
        for number, mount in enumerate(mounts if isinstance(mounts, list) else []):
            name = mount.get("name") if isinstance(mount, dict) else None
            if name is not None and name not in names:
                problems.unknown(
                    (*path, "containers", index, "volumeMounts", number, "name"),
                    name,
                    [str(each) for each in names],
                    f"the pod has no volume {name!r}",
                )


def _check_shared_memory(problems: Problems, path: Path, pod: dict[str, Any]) -> None:
    mounts = pod["containers"][0].get("volumeMounts") or []
    memory = {
        volume.get("name")
        for volume in pod.get("volumes") or []
        if isinstance(volume, dict) and (volume.get("emptyDir") or {}).get("medium") == "Memory"
    }
    shared = [mount for mount in mounts if isinstance(mount, dict) and mount.get("mountPath") == "/dev/shm"]
    if not shared or shared[0].get("name") not in memory:
        problems.add(
            (*path, "containers", 0, "volumeMounts"),
            "/dev/shm is missing: NCCL needs more than the 64 MiB a pod has; mount a volume with `emptyDir: "
            "{medium: Memory}` there",
        )


def parse_quantity(value: Any) -> float | None:
    """A Kubernetes quantity as a number: `500m` is 0.5, `64Gi` is 64 * 2**30. None if it is none."""
    match = _QUANTITY.fullmatch(str(value)) if not isinstance(value, bool) else None
    if match is None or match[2] not in _SUFFIXES:
        return None
    return float(match[1]) * _SUFFIXES[match[2]]


def is_kubernetes(data: Any) -> bool:
    return isinstance(data, dict) and ("apiVersion" in data or "kind" in data)
