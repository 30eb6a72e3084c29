"""The cache-aware router in a real Serve application: three replicas of a fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.bench.serve.paths import free_port, wait_until_ready
from cluster.config import EngineConfig
from cluster.serve.app import build_models_app, make_app
from cluster.status import collect
from tests.integration.http_server import until

REPLICAS = 3
CONFIG = EngineConfig(
    device="fake",
    fake_tokens_per_s=1500,
    num_pages=4096,
    max_running_requests=64,
    max_seq_len=4096,
    integrity_interval=1,
)


@pytest.fixture(scope="module")
def client(private_ray) -> Iterator[httpx.Client]:
    port = free_port()
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(make_app(CONFIG, {"num_replicas": REPLICAS}, {"num_replicas": 2}), name="router", route_prefix="/")
        wait_until_ready(f"http://127.0.0.1:{port}")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            yield client
    finally:
        serve.shutdown()


@pytest.fixture(scope="module")
def engines(client) -> DeploymentHandle:
    return serve.get_deployment_handle("engine", "router")


def reports(engines: DeploymentHandle) -> dict[str, dict]:
    return {each["replica"]: each["metrics"] for each in engines.broadcast("report").results(timeout_s=60)}


def complete(client: httpx.Client, prompt: list[int], max_tokens: int = 4) -> dict:
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def session(number: int, length: int) -> list[int]:
    return [(7919 * number + token) % 49_000 for token in range(length)]


def everybody_is_known(client: httpx.Client) -> bool:
    """Both ingresses have seen a request and have the reports of all replicas; each poll asks one at random."""
    answers = [client.get("/health").json() for _ in range(10)]
    return all(answer["unknown_replicas"] == 0 and len(answer["outstanding_tokens"]) == REPLICAS for answer in answers)


def samples(client: httpx.Client, name: str) -> list:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return [sample for family in families for sample in family.samples if sample.name == name]


def test_sessions_go_where_their_prefix_is(client, engines):
    complete(client, session(100, 64))

    def all_known() -> bool:  # an ingress learns of its replicas with its first request
        complete(client, session(101, 64))
        return everybody_is_known(client)

    until(all_known, 60)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: complete(client, session(number, 300)), range(12)))
        spread = [metrics["generation_tokens"] for metrics in reports(engines).values()]
        assert min(spread) > 0, spread  # misses spread

        def all_cached() -> bool:
            usages = pool.map(lambda number: complete(client, session(number, 310)), range(36))
            return all(usage["prompt_tokens_details"]["cached_tokens"] >= 256 for usage in usages)

        until(all_cached, 60)  # as soon as the replicas have reported


def test_work_goes_back_to_nothing(client):
    def outstanding() -> float:
        return sum(sample.value for sample in samples(client, "raydix_outstanding_tokens"))

    body = {"prompt": session(50, 100), "max_tokens": 3000, "n": 8, "ignore_eos": True, "stream": True}
    for _ in range(3):
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            next(lines)
            assert outstanding() >= 256
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: complete(client, session(60 + number, 200), 40), range(24)))
    assert client.post("/v1/completions", json={"prompt": [10**9], "max_tokens": 1}).status_code == 400
    until(lambda: outstanding() == 0, 60)
    for _ in range(10):  # of either ingress
        until(lambda: not any(client.get("/health").json()["outstanding_tokens"].values()), 60)


def test_many_choices_of_one_request(client):
    body = {"prompt": [session(80, 100), session(81, 100)], "n": 4, "max_tokens": 4, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        for answer in pool.map(lambda _: client.post("/v1/completions", json=body), range(16)):
            assert answer.status_code == 200
            assert len(answer.json()["choices"]) == 8


def test_metrics_and_readiness_are_of_all_replicas(client, engines):
    def finished() -> dict[str, float]:
        found = samples(client, "raydix_time_to_first_token_seconds_count")
        return {sample.labels["ingress"]: sample.value for sample in found}

    before = sum(finished().values())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: complete(client, session(90 + number, 100)), range(20)))
    assert len(finished()) == 2
    assert sum(finished().values()) == before + 20
    tokens = {sample.labels["replica"]: sample.value for sample in samples(client, "raydix_generation_tokens_total")}
    assert tokens == {name: metrics["generation_tokens"] for name, metrics in reports(engines).items()}
    assert [sample.value for sample in samples(client, "raydix_engine_up")] == [REPLICAS]
    ready = client.get("/ready").json()
    assert (ready["replicas"], ready["stats"]["running"]) == (REPLICAS, 0)
    assert ready["stats"]["total_pages"] == REPLICAS * CONFIG.num_pages


@pytest.mark.full_grid
def test_several_models_behind_one_address(client):
    args = {"device": "fake", "num_pages": 256, "max_seq_len": 512, "models": []}
    args["models"] = [{"served_model_name": "one"}, {"served_model_name": "org/two", "max_seq_len": 256}]
    serve.run(build_models_app(args), name="several", route_prefix="/several")
    until(lambda: client.get("/several/ready").status_code == 200, 60)
    cards = client.get("/several/v1/models").json()["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [("one", 512), ("org/two", 256)]
    assert client.get("/several/v1/models/org/two").json()["max_model_len"] == 256
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
    for name in ("one", "org/two"):
        answer = client.post("/several/v1/completions", json=body | {"model": name})
        assert (answer.status_code, answer.json()["model"]) == (200, name)
        assert client.post("/several/tokenize", json={"prompt": "a b", "model": name}).json()["count"] == 2
    for bad, status in (({}, 400), ({"model": "three"}, 404)):
        answer = client.post("/several/v1/completions", json=body | bad)
        assert answer.status_code == status
        assert answer.json()["error"]["param"] == "model" and "one, org/two" in answer.json()["error"]["message"]
    families = text_string_to_metric_families(client.get("/several/metrics").text)
    tokens = [each for family in families for each in family.samples if each.name == "raydix_generation_tokens_total"]
    assert {sample.labels["model_name"]: sample.value for sample in tokens} == {"one": 2, "org/two": 2}
    found = {status.name: len(status.replicas) for status in collect(timeout=120)}
    assert found == {"router": REPLICAS, "several": 2}
