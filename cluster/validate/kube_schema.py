"""Hand-kept shapes of the Kubernetes objects that our files use: KubeRay's ray.io/v1 and the parts of a pod around it.

A shape is a type, `[shape]` for a list of it, or a dict from key to shape; `!` after a key makes it required. `STRINGS`
is a mapping from text to text, `QUANTITIES` one from text to amounts, `ANY` is not looked into.
"""

from __future__ import annotations

from typing import Any

from cluster.validate.models import kind
from cluster.validate.problems import Problems
from cluster.validate.source import Path

STRINGS = object()
QUANTITIES = object()
ANY = object()
QUANTITY = (int, float, str)

_ENV = [{"name!": str, "value": str, "valueFrom": {
    "secretKeyRef": {"name!": str, "key!": str, "optional": bool},
    "configMapKeyRef": {"name!": str, "key!": str, "optional": bool},
    "fieldRef": {"fieldPath!": str, "apiVersion": str}, "resourceFieldRef": ANY,
}}]  # fmt: skip
_RESOURCES = {"limits": QUANTITIES, "requests": QUANTITIES, "claims": ANY}
_CONTAINER = {
    "name!": str, "image!": str, "imagePullPolicy": str, "command": [str], "args": [str], "workingDir": str,
    "env": _ENV, "envFrom": ANY, "resources": _RESOURCES, "securityContext": ANY, "lifecycle": ANY,
    "ports": [{"containerPort!": int, "name": str, "protocol": str, "hostPort": int, "hostIP": str}],
    "volumeMounts": [{"mountPath!": str, "name!": str, "readOnly": bool, "subPath": str, "subPathExpr": str,
                      "mountPropagation": str}],
    "livenessProbe": ANY, "readinessProbe": ANY, "startupProbe": ANY, "stdin": bool, "tty": bool,
    "terminationMessagePath": str, "terminationMessagePolicy": str,
}  # fmt: skip
_VOLUME = {
    "name!": str, "emptyDir": {"medium": str, "sizeLimit": QUANTITY},
    "persistentVolumeClaim": {"claimName!": str, "readOnly": bool}, "hostPath": {"path!": str, "type": str},
    "configMap": ANY, "secret": ANY, "nfs": {"server!": str, "path!": str, "readOnly": bool}, "csi": ANY,
    "ephemeral": ANY, "projected": ANY, "downwardAPI": ANY,
}  # fmt: skip
_METADATA = {"name": str, "namespace": str, "labels": STRINGS, "annotations": STRINGS}
_POD = {
    "containers!": [_CONTAINER], "initContainers": [_CONTAINER], "volumes": [_VOLUME], "nodeSelector": STRINGS,
    "tolerations": [{"key": str, "operator": str, "value": str, "effect": str, "tolerationSeconds": int}],
    "affinity": ANY, "topologySpreadConstraints": ANY, "serviceAccountName": str, "imagePullSecrets": [{"name!": str}],
    "terminationGracePeriodSeconds": int, "runtimeClassName": str, "priorityClassName": str, "hostNetwork": bool,
    "hostIPC": bool, "dnsPolicy": str, "schedulerName": str, "securityContext": ANY, "restartPolicy": str,
    "automountServiceAccountToken": bool, "enableServiceLinks": bool, "resourceClaims": ANY,
}  # fmt: skip
_TEMPLATE = {"metadata": _METADATA, "spec!": _POD}
_CLUSTER_SPEC = {
    "rayVersion!": str, "enableInTreeAutoscaling": bool, "suspend": bool, "headServiceAnnotations": STRINGS,
    "autoscalerOptions": {
        "upscalingMode": str, "idleTimeoutSeconds": int, "version": str, "image": str, "imagePullPolicy": str,
        "resources": _RESOURCES, "env": _ENV, "envFrom": ANY, "volumeMounts": ANY, "securityContext": ANY,
    },
    "gcsFaultToleranceOptions": ANY, "authOptions": ANY, "managedBy": str, "upgradeStrategy": ANY,
    "headGroupSpec!": {
        "rayStartParams": STRINGS, "template!": _TEMPLATE, "serviceType": str, "enableIngress": bool,
        "headService": ANY, "resources": ANY, "labels": STRINGS,
    },
    "workerGroupSpecs": [{
        "groupName!": str, "replicas": int, "minReplicas": int, "maxReplicas!": int, "numOfHosts": int,
        "idleTimeoutSeconds": int, "rayStartParams": STRINGS, "template!": _TEMPLATE, "scaleStrategy": ANY,
        "suspend": bool, "resources": ANY, "labels": STRINGS,
    }],
}  # fmt: skip
_OBJECT_METADATA = _METADATA | {"name!": str}
del _OBJECT_METADATA["name"]

SHAPES: dict[str, dict[str, Any]] = {
    "RayCluster": {"apiVersion!": str, "kind!": str, "metadata!": _OBJECT_METADATA, "spec!": _CLUSTER_SPEC},
    "RayService": {"apiVersion!": str, "kind!": str, "metadata!": _OBJECT_METADATA, "spec!": {
        "serveConfigV2!": str, "rayClusterConfig!": _CLUSTER_SPEC, "serveService": ANY,
        "excludeHeadPodFromServeSvc": bool, "upgradeStrategy": ANY, "serviceUnhealthySecondThreshold": int,
        "deploymentUnhealthySecondThreshold": int,
        "rayClusterDeletionDelaySeconds": int, "suspend": bool, "managedBy": str,
    }},
}  # fmt: skip


def check_shape(problems: Problems, path: Path, value: Any, shape: Any) -> None:
    """Adds a problem for each unknown or missing key, and each value of another type."""
    if shape is ANY:
        return
    if shape is STRINGS:
        _check_strings(problems, path, value)
    elif shape is QUANTITIES:
        for key, entry in value.items() if isinstance(value, dict) else ((None, value),):
            if key is None or isinstance(entry, bool) or not isinstance(entry, QUANTITY):
                problems.add(path if key is None else (*path, key), f"must be a quantity, not {kind(entry)}")
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            problems.add(path, f"must be a mapping, not {kind(value)}")
            return
        names = {key.rstrip("!"): inner for key, inner in shape.items()}
        problems.check_keys(path, value, names)
        for key in shape:
            if key.endswith("!") and key[:-1] not in value:
                problems.add((*path, key[:-1]), "is required here")
        for key, entry in value.items():
            if key in names:
                check_shape(problems, (*path, key), entry, names[key])
    elif isinstance(shape, list):
        if not isinstance(value, list):
            problems.add(path, f"must be a list, not {kind(value)}")
            return
        for index, entry in enumerate(value):
            check_shape(problems, (*path, index), entry, shape[0])
    elif not isinstance(value, shape) or (isinstance(value, bool) and shape is not bool):
        wanted = {str: "text (quote it)", int: "a whole number", bool: "true or false"}.get(shape, "a quantity")
        problems.add(path, f"must be {wanted}, not {kind(value)}")


def _check_strings(problems: Problems, path: Path, value: Any) -> None:
    if not isinstance(value, dict):
        problems.add(path, f"must be a mapping, not {kind(value)}")
        return
    for key, entry in value.items():
        if not isinstance(entry, str):
            problems.add((*path, key), f'must be text, not {kind(entry)}: Kubernetes refuses it; quote it, "{entry}"')
