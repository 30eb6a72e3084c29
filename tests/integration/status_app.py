"""Run by test_status: a shipped Serve file with two replicas on a private Ray, and `raydix status` of it."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from cluster.cli import EXIT_OK, main
from cluster.status import collect
from tests.integration.http_server import until

ROOT = Path(__file__).parents[2]


def two_replicas(port: int) -> dict[str, Any]:
    """serve/cpu-demo.yaml with two replicas, less memory, and another port."""
    config = yaml.safe_load((ROOT / "ray_configs/serve/cpu-demo.yaml").read_text())
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    application["args"] |= {"num_pages": 256, "max_seq_len": 512}
    application["deployments"] = [{"name": "engine", "num_replicas": 2}]
    return config


def run(directory: Path, port: int) -> None:
    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=128 << 20, log_to_driver=False)
    config = two_replicas(port)
    file = directory / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    assert main(["validate", str(file)]) == EXIT_OK
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    _get_global_client().deploy_apps(ServeDeploySchema(**config))
    until(lambda: serve.status().applications["raydix"].status.value == "RUNNING", 180)
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({"prompt": "one two three", "max_tokens": 8, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )

    def answered() -> bool:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)["usage"]["completion_tokens"] == 8
        except OSError:
            return False  # the ingress is still loading its tokenizer

    until(answered, 60)
    (application,) = collect(timeout=30)
    assert (application.name, application.status, application.silent) == ("raydix", "RUNNING", [])
    assert application.deployments["engine"][1]["RUNNING"] == 2
    first, second = application.replicas
    assert first.replica != second.replica
    assert {len(replica.info["ranks"]) for replica in application.replicas} == {1}
    assert first.metrics["generation_tokens"] + second.metrics["generation_tokens"] == 8
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main(["status", "--json", str(directory / "status.json")])
    print(output.getvalue())
    assert code == EXIT_OK
    for part in (first.replica, second.replica, "SmolLM2-135M-Instruct", "2 running", "tokens/s", "GPU"):
        assert part in output.getvalue(), part
    (found,) = json.loads((directory / "status.json").read_text())
    assert len(found["replicas"]) == 2
    serve.shutdown()
    ray.shutdown()
    print("done")


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
