"""Two groups of one rank behind the router, each with a card of its own; two Ray nodes with one card each."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.integration.http_server import Server, running_server, until
from tests.unit.tiny_tokenizers import byte_level

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")

PROMPT = 600


def complete(client: httpx.Client, session: int) -> int:
    """Tokens of the session's prompt that came from a cache."""
    prompt = [3 + (7 * session + number * number) % 90 for number in range(PROMPT)]
    body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "temperature": 0.0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def generated(server: Server) -> list[int]:
    """Tokens that each engine has generated."""
    reports = server.engine.broadcast("report").results(timeout_s=60)
    return sorted(report["metrics"]["generation_tokens"] for report in reports)


@pytest.mark.usefixtures("private_ray")
def test_two_groups_behind_the_router(tmp_path: Path) -> None:
    model = byte_level(make_checkpoint("llama", tmp_path, vocab_size=512, max_position_embeddings=1024))
    place = {"model": str(model), "device": "cuda", "gpu_memory_utilization": 0.5, "num_pages": 4096}
    with running_server({"num_replicas": 2}, **place) as server, server.client() as client:
        until(lambda: len(generated(server)) == 2, 120)
        cards = {rank["gpu_ids"][0] for rank in ranks(server)}
        assert len(cards) == 2
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda session: complete(client, session), range(16)))
            assert min(generated(server)) > 0  # both had work
            # as soon as the replicas have reported, every session goes where its prefix is
            until(lambda: min(pool.map(lambda session: complete(client, session), range(16))) >= PROMPT - 32, 60)
        assert sum(generated(server)) >= 2 * 16 * 16


def ranks(server: Server) -> list[dict]:
    """The ranks of both engines, as `raydix status` shows them."""
    reports = server.engine.broadcast("report").results(timeout_s=60)
    return [rank for report in reports for rank in report["info"]["ranks"]]


def test_two_nodes_with_a_card_each() -> None:
    """In a process of its own: a process can be connected to one Ray only."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.multi_gpu.two_nodes"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    print(child.stdout)
    assert child.returncode == 0 and child.stdout.endswith("done\n"), child.stdout + child.stderr[-4000:]
