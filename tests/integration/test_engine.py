"""`Engine` on a tiny model with real workers: requests in and out, refusals, counters, and its ends."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    OverloadedError,
)
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("private_ray")

MAX_SEQ_LEN = 128
NUM_PAGES = 64


class Client:
    """An engine whose outputs are gathered by request."""

    def __init__(self, model: Path, **config: object) -> None:
        settings = {"page_size": 4, "num_pages": NUM_PAGES, "max_running_requests": 4, "max_seq_len": MAX_SEQ_LEN}
        settings |= {"max_step_tokens": 32, "max_queued_requests": 300, "integrity_interval": 1, "device": "cpu"}
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.errors: dict[int, str] = {}
        self.failures: list[EngineError] = []
        self.changed = threading.Condition()
        self.engine = Engine(EngineConfig(model=str(model), **(settings | config)), self._on_outputs, self._on_failure)

    def _on_outputs(self, outputs: StepOutputs) -> None:
        with self.changed:
            self.errors |= outputs.errors
            columns = (outputs.request_ids.tolist(), outputs.tokens.tolist(), outputs.finish.tolist())
            for request_id, token, finish in zip(*columns, strict=True):
                assert request_id not in self.finish, "an output after the finish"
                if token >= 0:
                    self.tokens.setdefault(request_id, []).append(token)
                if finish:
                    self.finish[request_id] = FinishReason(finish)
            self.changed.notify_all()

    def _on_failure(self, error: EngineError) -> None:
        with self.changed:
            self.failures.append(error)
            self.changed.notify_all()

    def wait(self, condition, timeout: float = 120.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout), (self.finish, self.failures)

    def run(self, *requests: Request) -> list[list[int]]:
        for request in requests:
            self.engine.submit(request)
        self.wait(lambda: all(request.request_id in self.finish for request in requests))
        return [self.tokens.get(request.request_id, []) for request in requests]


_ids = iter(range(1, 1 << 30))


def request(prompt: list[int], max_tokens: int = 8, **sampling: object) -> Request:
    values = {"temperature": 0.0, "seed": 0, "ignore_eos": True, "max_tokens": max_tokens} | sampling
    return Request(next(_ids), np.array(prompt), SamplingParams(**values))


@pytest.fixture(scope="module")
def client(tiny_llama: Path) -> Iterator[Client]:
    client = Client(tiny_llama)
    client.engine.start()
    yield client
    client.engine.shutdown()


def all_pages_are_back(client: Client) -> bool:
    stats = client.engine.stats()
    return (
        stats["running"] == 0
        and stats["in_flight"] == 0
        and stats["free_pages"] + stats["cached_pages"] == stats["total_pages"] == NUM_PAGES
    )


def wait_until(condition, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_info_holds_the_effective_settings(client: Client) -> None:
    info = client.engine.info
    assert (info.num_pages, info.max_seq_len, info.vocab_size) == (NUM_PAGES, MAX_SEQ_LEN, 101)
    assert (info.config.device, info.config.dtype, info.served_name) == ("cpu", "float32", "llama")
    assert info.eos_token_ids == (2,)
    assert [rank.pid for rank in info.ranks] and psutil.pid_exists(info.ranks[0].pid)
    assert {"placement", "actors", "import", "load", "allocate", "warm-up", "total"} <= info.startup_seconds.keys()


def test_tokens_are_transformers_tokens(client: Client, tiny_llama: Path) -> None:
    import torch

    from tests.checkpoints import load_reference

    reference = load_reference(tiny_llama)
    prompts = [[5, 6, 7], list(range(3, 40)), [9] * 17]
    ours = client.run(*(request(prompt, 20) for prompt in prompts))
    for prompt, tokens in zip(prompts, ours, strict=True):
        theirs = reference.generate(
            torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False, eos_token_id=None
        )
        assert theirs[0, len(prompt) :].tolist() == tokens


def test_a_second_request_finds_the_first_ones_pages(client: Client) -> None:
    prompt = list(range(40, 90))
    client.run(request(prompt))
    before = client.engine.stats()
    client.run(request(prompt))
    after = client.engine.stats()
    assert after["prefilled_tokens"] - before["prefilled_tokens"] == len(prompt) - (len(prompt) - 1) // 4 * 4


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 8, "empty"),
        ([1] * MAX_SEQ_LEN, 8, str(MAX_SEQ_LEN)),
        ([1, 101], 8, "vocabulary of 101"),
    ],
)
def test_bad_requests_are_refused_at_once(client: Client, prompt: list[int], max_tokens: int, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        client.engine.submit(request(prompt, max_tokens))
    assert len(client.run(request([5, 6], 3))[0]) == 3
    wait_until(lambda: all_pages_are_back(client))


def test_an_id_in_use_is_refused_and_free_again_after_the_finish(client: Client) -> None:
    first = request([5, 6], 60)
    client.engine.submit(first)
    with pytest.raises(InvalidRequestError, match="in use"):
        client.engine.submit(first)
    client.wait(lambda: first.request_id in client.finish)
    assert len(client.tokens[first.request_id]) == 60
    del client.finish[first.request_id], client.tokens[first.request_id]
    assert len(client.run(first)[0]) == 60


def test_abort_of_an_unknown_request_is_ignored(client: Client) -> None:
    client.engine.abort(1 << 40)
    assert len(client.run(request([5, 6], 3))[0]) == 3


def test_200_requests_with_random_aborts_give_every_page_back(client: Client) -> None:
    rng = random.Random(0)
    requests = [
        request([rng.randrange(3, 101) for _ in range(rng.randrange(1, 60))], rng.randrange(0, 40)) for _ in range(200)
    ]
    aborted = set()
    for one in requests:
        client.engine.submit(one)
        if rng.random() < 0.3:
            victim = rng.choice(requests[: requests.index(one) + 1])
            aborted.add(victim.request_id)
            client.engine.abort(victim.request_id)
        if rng.random() < 0.1:
            time.sleep(0.02)
    client.wait(lambda: all(one.request_id in client.finish for one in requests), timeout=120)
    for one in requests:
        finish = client.finish[one.request_id]
        assert finish == FinishReason.LENGTH or (finish == FinishReason.ABORT and one.request_id in aborted)
        if finish == FinishReason.LENGTH:
            assert len(client.tokens.get(one.request_id, [])) == one.sampling.max_tokens
    wait_until(lambda: all_pages_are_back(client))


def test_a_pool_too_small_for_one_request_says_so_and_serves_the_others(tiny_llama: Path) -> None:
    client = Client(tiny_llama, num_pages=5)
    client.engine.start()
    try:
        with pytest.raises(InvalidRequestError, match=r"needs 6 pages.*has 5"):
            client.engine.submit(request([5] * 21, 1))
        grows = request([5, 6, 7], 60)  # its prompt fits
        client.run(grows)
        assert client.finish[grows.request_id] == FinishReason.INVALID
        assert "5 pages of 4 tokens" in client.errors[grows.request_id]
        small = request([5, 6], 10)
        assert len(client.run(small)[0]) == 10
        wait_until(lambda: client.engine.stats()["free_pages"] + client.engine.stats()["cached_pages"] == 5)
    finally:
        client.engine.shutdown()


def test_a_full_queue_refuses_with_429_and_recovers(tiny_llama: Path) -> None:
    client = Client(tiny_llama, max_running_requests=1, max_queued_requests=2)
    client.engine.start()
    try:
        requests = [request([5, 6], 60) for _ in range(4)]
        for one in requests[:3]:
            client.engine.submit(one)
        with pytest.raises(OverloadedError):
            client.engine.submit(requests[3])
        client.wait(lambda: requests[0].request_id in client.finish)
        client.run(requests[3])
    finally:
        client.engine.shutdown()


def test_a_killed_rank_fails_what_runs_and_what_comes(tiny_llama: Path) -> None:
    client = Client(tiny_llama, tp_size=2, max_recoveries=0)
    info = client.engine.start()
    client.engine.submit(request([5, 6], 100))
    client.wait(lambda: client.tokens)
    os.kill(info.ranks[1].pid, signal.SIGKILL)
    client.wait(lambda: client.failures, timeout=60)
    assert isinstance(client.failures[0], EngineDeadError) and "rank 1 (pid" in str(client.failures[0])
    with pytest.raises(EngineDeadError):
        client.engine.submit(request([5, 6], 1))
    assert client.engine.failure is client.failures[0]
    wait_until(lambda: not any(psutil.pid_exists(rank.pid) for rank in info.ranks))
    assert client.engine.stats() == {}
    client.engine.shutdown()


def test_shutdown_fails_what_runs_and_refuses_what_comes(tiny_llama: Path) -> None:
    client = Client(tiny_llama)
    info = client.engine.start()
    client.engine.submit(request([5, 6], 100))
    client.wait(lambda: client.tokens)
    client.engine.shutdown()
    client.engine.shutdown()
    assert isinstance(client.failures[0], EngineClosedError)
    with pytest.raises(EngineClosedError):
        client.engine.submit(request([5, 6], 1))
    assert not psutil.pid_exists(info.ranks[0].pid)


def test_a_tp_size_that_does_not_divide_names_those_that_do(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"1, 2, 4, 8"):
        Client(tiny_llama, tp_size=3).engine.start()


def test_a_checkpoint_with_a_missing_tensor_names_it(tiny_llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = Path(shutil.copytree(tiny_llama, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight"):
        Client(broken).engine.start()


def test_an_unknown_architecture_names_the_known_ones(tiny_llama: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(tiny_llama, tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text()) | {"model_type": "gpt2", "architectures": ["X"]}
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"gpt2.*llama"):
        Client(broken).engine.start()


def test_a_sequence_limit_above_the_models_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="256"):
        Client(tiny_llama, max_seq_len=1000).engine.start()
