"""Every file we ship is valid, and typical mistakes are found, each with its file, line and key."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli import EXIT_OK, EXIT_USAGE, main
from cluster.errors import ConfigError
from cluster.validate import validate_files

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "ray_configs"
CLUSTERS = sorted((CONFIGS / "clusters").glob("*.yaml"))
SERVE = sorted((CONFIGS / "serve").glob("*.yaml"))


@pytest.fixture(autouse=True)
def in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # file_mounts are relative to it


def test_every_shipped_file_is_valid() -> None:
    files = [str(path) for path in CONFIGS.rglob("*.yaml")]
    assert len(files) >= 14
    assert validate_files(files).problems == []


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda path: path.stem)
def test_every_application_fits_every_cluster(cluster: Path) -> None:
    report = validate_files([str(cluster), *map(str, SERVE)])
    assert report.problems == []
    assert len(report.notes) == len(SERVE)
    assert all("fits" in note for note in report.notes)


@dataclass(frozen=True)
class Mistake:
    """`old` becomes `new` in `file`; the error must name `key` and say `says`. `beside`: another file to check with."""

    file: str
    old: str
    new: str
    key: str
    says: str
    beside: str | None = None


AUTO, REPLICAS, TP8, P5 = "serve/autoscaling.yaml", "serve/replicas.yaml", "serve/tp8.yaml", "clusters/aws-p5.yaml"
GCP, AZURE, LOCAL = "clusters/gcp-a3.yaml", "clusters/azure.yaml", "clusters/on-premise.yaml"
DEMO, TP4 = "serve/cpu-demo.yaml", "serve/tp4.yaml"
SERVICE, RAYCLUSTER = "kuberay/rayservice.yaml", "kuberay/raycluster.yaml"
ENGINE = "applications[0].deployments[0]"
MISTAKES = [
    # Serve: keys that Ray ignores
    Mistake(REPLICAS, "num_replicas: 4", "num_replica: 4", f"{ENGINE}.num_replica", "did you mean num_replicas?"),
    Mistake(REPLICAS, "num_replicas: 4", "max_ongoing_request: 4", f"{ENGINE}.max_ongoing_request",
            "did you mean max_ongoing_requests?"),
    Mistake(REPLICAS, "num_replicas: 4", "ray_actor_options: {num_gpu: 1}", f"{ENGINE}.ray_actor_options.num_gpu",
            "did you mean num_gpus?"),
    Mistake(TP8, "proxy_location:", "proxy_locations:", "proxy_locations", "did you mean proxy_location?"),
    Mistake(TP8, "  port: 8000", "  ports: 8000", "http_options.ports", "did you mean port?"),
    Mistake(TP8, "applications:", "application:", "application", "did you mean applications?"),
    Mistake(TP8, "    route_prefix: /", "    route_prefx: /", "applications[0].route_prefx", "route_prefix"),
    Mistake(AUTO, "max_replicas: 4", "max_replica: 4", f"{ENGINE}.autoscaling_config.max_replica", "max_replicas"),
    Mistake(AUTO, "look_back_period_s", "look_back_period",
            f"{ENGINE}.autoscaling_config.look_back_period", "unknown key"),
    Mistake(REPLICAS, "num_replicas: 4", "logging_config: {level: DEBUG}", f"{ENGINE}.logging_config.level",
            "unknown key"),
    # Serve: values
    Mistake(TP8, "port: 8000", "port: 80000", "http_options.port", "no TCP port"),
    Mistake(AUTO, "min_replicas: 1", "min_replicas: 6", f"{ENGINE}.autoscaling_config.", "must be greater than"),
    Mistake(AUTO, "      - name: engine", "      - name: engine\n        num_replicas: 2", f"{ENGINE}.num_replicas",
            "not allowed when autoscaling_config"),
    Mistake(REPLICAS, "num_replicas: 4", "num_replicas: 0", f"{ENGINE}.num_replicas", "greater than 0"),
    Mistake(REPLICAS, "num_replicas: 4", "placement_group_strategy: STRICTPACK",
            f"{ENGINE}.placement_group_strategy", "did you mean STRICT_PACK?"),
    Mistake(REPLICAS, "num_replicas: 4", "placement_group_bundles: [{CPU: 1}, {GPUs: 1}]",
            f"{ENGINE}.placement_group_bundles[1].GPUs", "did you mean GPU?"),
    Mistake(REPLICAS, "num_replicas: 4", "placement_group_bundles: [{CPU: 1}, {GPU: 1}]",
            f"{ENGINE}.placement_group_bundles", "places its ranks itself"),
    Mistake(REPLICAS, "num_replicas: 4", "ray_actor_options: {num_gpus: 1}", f"{ENGINE}.ray_actor_options.num_gpus",
            "a driver uses no GPU"),
    Mistake(REPLICAS, "- name: engine", "- name: engin", f"{ENGINE}.name", "did you mean engine?"),
    Mistake(REPLICAS, "- name: ingress", "- name: engine", "applications[0].deployments[1].name", "stands twice"),
    Mistake(TP8, "build_openai_app", "build_openai_ap", "applications[0].import_path", "mean build_openai_app?"),
    Mistake(TP8, "cluster.serve:", "cluster.server:", "applications[0].import_path", "no module cluster.server"),
    Mistake(TP8, "    route_prefix: /", "    route_prefix: v1", "applications[0].route_prefix", "must start with /"),
    Mistake(TP8, "    route_prefix: /", "    runtime_env: {pips: [torch]}", "applications[0].runtime_env.pips", "pip"),
    # our own settings
    Mistake(TP8, "tp_size: 8", "tp_sise: 8", "applications[0].args.tp_sise", "did you mean tp_size?"),
    Mistake(TP8, "tp_size: 8", "tensor_parallel_size: 8", "applications[0].args.tensor_parallel_size", "tp_size"),
    Mistake(TP8, "tp_size: 8", "tp_size: 0", "applications[0].args.tp_size", "greater than or equal to 1"),
    Mistake(TP8, "tp_size: 8", "tp_size: 8\n      executor: inproc", "applications[0].args.executor", "one rank"),
    Mistake(TP8, "device: cuda", "device: cpu\n      attention_backend: flash",
            "applications[0].args.attention_backend", "on a GPU"),
    Mistake(TP8, "device: cuda", "device: gpu", "applications[0].args.device", "'auto', 'cpu', 'cuda' or 'fake'"),
    # shapes that are known without a checkpoint
    Mistake(DEMO, "tp_size: 1", "tp_size: 2", "applications[0].args.tp_size", "sizes that work are 1, 3"),
    Mistake(TP4, "tp_size: 4", "tp_size: 3", "applications[0].args.tp_size", "Qwen3-32B: tensor-parallel size 3"),
    Mistake(SERVICE, "          tp_size: 8", "          tp_size: 24", "applications[0].args.tp_size", "Llama-3.1-70B"),
    # both files together
    Mistake(TP8, "tp_size: 8", "tp_size: 32", "applications[0].args.tp_size", "32 GPU, which do not fit", beside=P5),
    Mistake(REPLICAS, "num_replicas: 4", "num_replicas: 17", f"{ENGINE}.num_replicas", "at most", beside=P5),
    Mistake(TP8, "device: cuda", "device: auto", "applications[0].args.device", "write cuda", beside=P5),
    Mistake(TP8, "placement_timeout: 900", "placement_timeout: 20", "applications[0].args.placement_timeout",
            "before a GPU node has started", beside=P5),
    Mistake(P5, "max_workers: 2\n\n", "max_workers: 0\n\n", "applications[0].args.tp_size",
            "do not fit", beside=TP8),
    # `ray up`
    Mistake(P5, "idle_timeout_minutes", "idle_timeout_minute", "idle_timeout_minute", "idle_timeout_minutes"),
    Mistake(P5, "head_node_type: head", "head_node_type: haed", "head_node_type", "must be one of"),
    Mistake(P5, "availability_zone: us-west-2a", "availability_zone: us-east-1a", "provider.availability_zone",
            "not in region us-west-2"),
    Mistake(P5, "cache_stopped_nodes", "cache_stop_nodes", "provider.cache_stop_nodes", "cache_stopped_nodes"),
    Mistake(P5, "InstanceType: p5", "instance_type: p5", "available_node_types.gpu.node_config.instance_type",
            "did you mean InstanceType?"),
    Mistake(P5, "GPU: 8}", "GPU: 16}", "available_node_types.gpu.resources.GPU", "p5.48xlarge has 8 GPU"),
    Mistake(P5, "GPU: 8}", "gpus: 8}", "available_node_types.gpu.resources.gpus", "did you mean GPU?"),
    Mistake(P5, "    min_workers: 0\n    max_workers: 2", "    min_workers: 3\n    max_workers: 2",
            "max_workers", "smaller than the sum of `min_workers`"),
    Mistake(P5, "worker: worker", "worker: wroker", "file_mounts.~/raydix/worker", "does not exist"),
    Mistake(P5, "    --autoscaling-config=~/ray_bootstrap_config.yaml\n", "", "head_start_ray_commands[1]",
            "needs --autoscaling-config"),
    Mistake(P5, "$RAY_HEAD_IP:6379", "$HEAD_IP:6379", "worker_start_ray_commands[1]", "must be $RAY_HEAD_IP"),
    Mistake(P5, "setup_commands:\n  - python3", "setup_comands:\n  - python3", "setup_comands", "setup_commands"),
    Mistake(P5, "ssh_user", "ssh_usr", "auth.ssh_usr", "did you mean ssh_user?"),
    Mistake(P5, "type: aws", "type: asw", "provider.type", "did you mean aws?"),
    Mistake(GCP, "machineType: a3", "machine_type: a3", "available_node_types.gpu.node_config.machine_type",
            "did you mean machineType?"),
    Mistake(AZURE, "resource_group:", "resource_groups:", "provider.resource_groups", "did you mean resource_group?"),
    Mistake(AZURE, "vmSize: Standard_ND", "vm_size: Standard_ND",
            "available_node_types.gpu.node_config.azure_arm_parameters.vm_size", "did you mean vmSize?"),
    Mistake(LOCAL, "head_ip:", "head_ips:", "provider.head_ips", "did you mean head_ip?"),
    Mistake(LOCAL, "auth:", "available_node_types:\n  gpu: {resources: {}, node_config: {}}\nauth:",
            "available_node_types", "not supported for on-premise"),
    Mistake(LOCAL, "host_resources:", "host_resource:", "metadata.raydix.host_resource", "host_resources"),
    # Kubernetes
    Mistake(RAYCLUSTER, "workerGroupSpecs:", "workerGroupSpec:", "spec.workerGroupSpec", "workerGroupSpecs"),
    Mistake(RAYCLUSTER, "kind: RayCluster", "kind: Raycluster", "kind", "did you mean RayCluster?"),
    Mistake(RAYCLUSTER, 'num-gpus: "0"', "num-gpus: 0", "spec.headGroupSpec.rayStartParams.num-gpus", "quote it"),
    Mistake(RAYCLUSTER, 'num-gpus: "0"', 'num-gpu: "0"', "spec.headGroupSpec.rayStartParams.num-gpu", "num-gpus"),
    Mistake(RAYCLUSTER, "- {mountPath: /dev/shm, name: shm}", "", "volumeMounts", "/dev/shm is missing"),
    Mistake(RAYCLUSTER, "minReplicas: 0", "minReplicas: 3", "spec.workerGroupSpecs[0].minReplicas", "between 0 and"),
    Mistake(RAYCLUSTER, "memory: 16Gi}\n              limits", "memory: 16Gb}\n              limits",
            "resources.requests.memory", "no quantity"),
    Mistake(RAYCLUSTER, '2.60.0"', '2.9.0"', "spec.rayVersion", "runs with Ray"),
    Mistake(SERVICE, 'limits: {cpu: "32", memory: 512Gi, nvidia.com/gpu: "8"}', 'limits: {cpu: "32", memory: 512Gi}',
            "requests.nvidia.com/gpu", "need a limit"),
    Mistake(SERVICE, "          tp_size: 8", "          tp_sizes: 8", "applications[0].args.tp_sizes", "tp_size"),
    Mistake(SERVICE, "max_replicas: 2", "max_replicas: 3", f"{ENGINE}.autoscaling_config.max_replicas", "at most"),
]  # fmt: skip


MODELS = """\
applications:
  - name: raydix
    import_path: cluster.serve:build_models_app
    args:
      device: cuda
      placement_timeout: 900
      models:
        - {model: org/small, served_model_name: small}
        - {model: org/large, tp_size: 8}
    deployments:
      - name: engine-small
        num_replicas: 4
"""
ARGS = "applications[0].args"


def test_several_models_that_fit(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(MODELS)
    report = validate_files([str(CONFIGS / P5), str(file)])
    assert report.problems == []
    assert "it uses 1 x head, 2 x gpu" in report.notes[0]


@pytest.mark.parametrize(
    ("old", "new", "key", "says"),
    [
        ("tp_size: 8", "tp_size: 64", f"{ARGS}.models[1].tp_size", "68 GPU, which do not fit"),
        ("device: cuda", "device: cuda\n      tp_size: 16", f"{ENGINE}.num_replicas", "72 GPU, which do not fit"),
        ("num_replicas: 4", "num_replicas: 9", f"{ENGINE}.num_replicas", "17 GPU, which do not fit"),
        ("num_replicas: 4", "ray_actor_options: {num_gpus: 1}", f"{ENGINE}.ray_actor_options.num_gpus", "uses no GPU"),
        ("num_replicas: 4", "placement_group_bundles: [{GPU: 1}]", f"{ENGINE}.placement_group_bundles", "itself"),
        ("engine-small", "engine-smal", f"{ENGINE}.name", "did you mean engine-small?"),
        ("tp_size: 8", "device: auto", f"{ARGS}.models[1].device", "write cuda"),
        ("device: cuda", "device: auto", f"{ARGS}.device", "write cuda"),
        ("placement_timeout: 900", "placement_timeout: 20", f"{ARGS}.placement_timeout", "before a GPU node"),
        ("tp_size: 8", "tp_sise: 8", f"{ARGS}.models[1].tp_sise", "did you mean tp_size?"),
        ("tp_size: 8", "tensor_parallel_size: 8", f"{ARGS}.models[1].tensor_parallel_size", "it is called tp_size"),
        ("placement_timeout: 900", "executor: inproc", f"{ARGS}.models", "not tp_size 8"),
        ("org/large", "small", f"{ARGS}.models", "two have one name"),
        ("models:", "modles:", f"{ARGS}.modles", "unknown key"),
        ("org/large, tp_size: 8", "Qwen/Qwen3-32B, tp_size: 7", f"{ARGS}.models[1].tp_size", "64 attention heads"),
        ("model: org/small, served_model_name", "tp_size: 2, served_model_name", f"{ARGS}.models[0].tp_size", "1, 3"),
    ],
)
def test_mistakes_in_the_settings_of_several_models(old: str, new: str, key: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    assert MODELS.count(old) == 1
    file.write_text(MODELS.replace(old, new))
    (problem,) = validate_files([str(CONFIGS / P5), str(file)]).problems
    assert problem.key == key
    assert says in problem.message


def break_file(mistake: Mistake, directory: Path) -> tuple[Path, int]:
    """The file with the mistake, and the line on which it begins."""
    text = (CONFIGS / mistake.file).read_text()
    assert mistake.old in text, f"{mistake.file} has no {mistake.old!r} any more"
    start = text.index(mistake.old)
    broken = directory / Path(mistake.file).name
    broken.write_text(text[:start] + mistake.new + text[start + len(mistake.old) :])
    return broken, text.count("\n", 0, start) + 1


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{Path(m.file).stem}-{m.key.rpartition('.')[2]}")
def test_a_typical_mistake_is_named(mistake: Mistake, tmp_path: Path) -> None:
    broken, _ = break_file(mistake, tmp_path)
    files = [str(broken)] + ([str(CONFIGS / mistake.beside)] if mistake.beside else [])
    problems = validate_files(files).problems
    named = [p for p in problems if p.key == mistake.key or (mistake.key[-1] == "." and mistake.key in p.key)]
    named = named or [p for p in problems if p.key.endswith(mistake.key)]
    assert named, "\n".join(map(str, problems)) or "no problem was found"
    assert all(mistake.says in p.message for p in named), "\n".join(map(str, named))


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if "unknown" in m.says or "did you mean" in m.says][:8],
                         ids=lambda m: m.key)  # fmt: skip
def test_the_line_is_that_of_the_key(mistake: Mistake, tmp_path: Path) -> None:
    broken, line = break_file(mistake, tmp_path)
    problem = next(p for p in validate_files([str(broken)]).problems if p.key == mistake.key)
    assert (problem.file, problem.line) == (str(broken), line)


def test_lines_of_serve_config_inside_a_kubernetes_file(tmp_path: Path) -> None:
    mistake = Mistake(SERVICE, "          tp_size: 8", "          tp_sizes: 8", "", "")
    broken, line = break_file(mistake, tmp_path)
    (problem,) = validate_files([str(broken)]).problems
    assert problem.line == line


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(CONFIGS / P5), str(CONFIGS / TP8)]) == EXIT_OK
    assert "fits" in capsys.readouterr().out
    broken, line = break_file(MISTAKES[0], tmp_path)
    assert main(["validate", str(broken)]) == EXIT_USAGE
    assert re.match(rf"{re.escape(str(broken))}:{line}: applications\[0\]", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1, 2", "3:|2:|1:"),
        ("a: b: c", ":1:"),
        ("? {a: 1}\n: 2", "unhashable|found"),
        ("\ta: 1", ":1:"),
        ("b: 1\na: &x\n  - c: *x", r"^\S+:3: a\[0\].c: an alias of what it stands in"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_what_is_not_yaml_names_the_line(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        validate_files([str(file)])


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        validate_files([str(tmp_path / "none.yaml")])
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    (problem,) = validate_files([str(tmp_path / "empty.yaml")]).problems
    assert "neither" in problem.message


def test_keys_of_clients_are_not_printed(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("api_key: sk-very-secret\n")
    (problem,) = validate_files([str(file)]).problems
    assert problem.key == "api_key"
    assert "secret" not in problem.message


def test_a_key_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text("tp_size: 2\non: 1\n")
    (problem,) = validate_files([str(file)]).problems
    assert "quote it" in problem.message
    assert problem.line == 2


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("tp_size: 2\npage_size: 16\ntp_size: 4\n")
    (problem,) = validate_files([str(file)]).problems
    assert (problem.line, problem.key) == (3, "tp_size")


def paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Of everything inside `value`."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*path, key)
        yield from paths(entry, (*path, key))


@pytest.mark.parametrize("file", [AUTO, P5, LOCAL, SERVICE, RAYCLUSTER], ids=lambda name: Path(name).stem)
def test_values_of_any_type_are_problems_and_not_crashes(file: str, tmp_path: Path) -> None:
    junk = [None, True, 0, -1, 1.5, "", "x", [], ["a"], {}, {"a": 1}, [{}], [None], 10**9, {1: 2}]
    chance = random.Random(0)
    text, broken = (CONFIGS / file).read_text(), tmp_path / "broken.yaml"
    for _ in range(25):
        data = yaml.safe_load(text)
        *above, last = chance.choice(list(paths(data)))
        place = data
        for key in above:
            place = place[key]
        place[last] = chance.choice(junk)
        broken.write_text(yaml.safe_dump(data))
        for problem in validate_files([str(broken)]).problems:
            assert problem.line >= 1
            assert problem.message
