"""All files together: which kind each is, its own problems, and whether what is served fits where it is to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cluster.config import EngineConfig
from cluster.validate.capacity import Nodes, place
from cluster.validate.cluster_file import check_cluster, unknown_types
from cluster.validate.engines import check_growth
from cluster.validate.kube_file import check_kubernetes, is_kubernetes
from cluster.validate.models import check_model
from cluster.validate.problems import Problem, Problems, check_text, nearest
from cluster.validate.serve_file import ServedApplication, check_serve, demands
from cluster.validate.source import Source, load_file

# Keys that tell a file's kind; near misses count, since a file whose first key is misspelt is still what it is.
_TELLING = {
    "serve": ("applications", "proxy_location", "http_options", "grpc_options", "import_path"),
    "cluster": ("cluster_name", "provider", "available_node_types", "head_node_type", "max_workers", "setup_commands"),
    "engine": tuple(EngineConfig.model_fields),
}


@dataclass(slots=True)
class Report:
    """`problems` in the order of files and lines; `notes` say what was proved, or could not be."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Cluster:
    file: str
    nodes: Nodes


@dataclass(slots=True)
class _Served:
    problems: Problems
    applications: list[ServedApplication]
    own_cluster: Nodes | None = None  # of a RayService


def validate_files(files: list[str]) -> Report:
    """Check files one by one, and what is served against the cluster file if there is exactly one.

    Raises:
        ConfigError: a file cannot be read or is not YAML; names file and line.
    """
    clusters: list[_Cluster] = []
    served: list[_Served] = []
    checked: list[Problems] = []
    report = Report()
    for file in files:
        for source in load_file(file):
            problems = Problems(source)
            checked.append(problems)
            check_text(problems)
            if not source.odd_keys:
                _check_document(source, problems, checked, clusters, served)
    if not any(checked):
        for each in served:
            _check_fit(each, clusters, report)
    for problems in checked:
        report.problems.extend(problems.sorted)
    return report


def _check_document(
    source: Source, problems: Problems, checked: list[Problems], clusters: list[_Cluster], served: list[_Served]
) -> None:
    data = source.data
    if is_kubernetes(data):
        nodes, applications, inner = check_kubernetes(problems, data)
        if inner is not None:
            checked.append(inner)
            served.append(_Served(inner, applications, nodes))
        elif nodes is not None:
            clusters.append(_Cluster(source.file, nodes))
        return
    kind = file_kind(data)
    if kind == "serve":
        served.append(_Served(problems, check_serve(problems, data)))
    elif kind == "cluster":
        nodes = check_cluster(problems, data)
        if nodes is not None:
            clusters.append(_Cluster(source.file, nodes))
    elif kind == "engine":
        check_model(problems, (), data, EngineConfig)
    else:
        problems.add((), "is neither a cluster file, a Serve file, a Kubernetes object nor settings for --config")


def file_kind(data: Any) -> str | None:
    """ "serve", "cluster" or "engine", by most keys that are known or nearly so; None if there are none."""
    if not isinstance(data, dict):
        return None
    scores = {kind: sum(nearest(str(key), keys) is not None for key in data) for kind, keys in _TELLING.items()}
    best = max(scores, key=lambda kind: scores[kind])
    return best if scores[best] else None


def _check_fit(served: _Served, clusters: list[_Cluster], report: Report) -> None:
    file = served.problems.source.file
    if served.own_cluster is not None:
        nodes, where = served.own_cluster, "its own cluster"
    elif len(clusters) == 1:
        nodes, where = clusters[0].nodes, clusters[0].file
    else:
        return
    if names := unknown_types(nodes):
        report.notes.append(f"{file}: not proved to fit {where}: the resources of {', '.join(names)} are not written")
        return
    for application in served.applications:
        check_growth(served.problems, application.engines.values(), nodes)
    asked = [demand for application in served.applications for demand in demands(application, nodes.has_gpus)]
    used, misfit, why = place(nodes, asked)
    if misfit is not None:
        served.problems.add(misfit.path, f"deployment {misfit.name!r} does not fit: {why}")
        return
    shown = ", ".join(f"{count} x {name}" for name, count in used.items())
    report.notes.append(f"{file}: fits {where}; with all replicas it uses {shown}")
