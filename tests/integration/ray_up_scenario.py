"""Run by test_ray_up on the operator's host: ray up, doctor, two deployments, a network that is cut, ray down."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.integration.hosts import NETWORK, plug
from tests.integration.ray_up_files import ROOT, TINY_TOKENS

BIN = Path(sys.prefix) / "bin"
FRANCE = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
WORKERS = {f"{NETWORK}.11": "first", f"{NETWORK}.12": "second"}


class Cluster:
    """The cluster as its operator handles it. `directory` lies on a disk that all hosts see."""

    def __init__(self, directory: Path, head: str) -> None:
        self._directory = directory
        self._file = directory / "cluster.yaml"
        self.url = f"http://{head}:8000"
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

    def ray(self, command: str, *arguments: str, timeout: float = 300) -> str:
        """`ray COMMAND cluster.yaml`, which has to succeed."""
        line = [str(BIN / "ray"), command, *(["-y"] if command in ("up", "down") else []), str(self._file), *arguments]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, f"ray {command} {arguments}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    def on_head(self, command: str) -> str:
        return self.ray("exec", command)

    def wait_for_nodes(self, count: int, seconds: float) -> None:
        self.until(lambda: f" {count} local.cluster.node" in self.on_head("ray status"), seconds, f"{count} nodes")

    def deploy(self, name: str) -> None:
        self.on_head(f"serve deploy {self._directory / name}")

    def hosts_of_ranks(self) -> list[list[str]]:
        """For every replica the addresses of its ranks."""
        path = self._directory / "status.json"
        try:
            self.on_head(f"raydix status --json {path}")
            (application,) = json.loads(path.read_text())
        except AssertionError:  # something does not serve yet
            return []
        return [[rank["node_ip"] for rank in replica["info"]["ranks"]] for replica in application["replicas"]]

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def until(self, condition: Any, seconds: float, what: str) -> None:
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < seconds, f"not within {seconds:g} s: {what}"
            time.sleep(2)
        self.say(f"{what} (after {time.monotonic() - start:.0f} s)")

    def asks(self) -> None:
        answer = httpx.post(f"{self.url}/v1/completions", json=FRANCE, timeout=60)
        assert answer.status_code == 200 and "Paris" in answer.text, answer.text

    def continuation(self, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": TINY_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    async def streams_over_a_cut(self, count: int, tokens: int, cut_for: float) -> None:
        """Streams while the cable of a worker with ranks is out; each has to end with exactly its tokens."""
        worker = WORKERS[self.hosts_of_ranks()[-1][-1]]
        async with httpx.AsyncClient(base_url=self.url, timeout=400) as client:
            streams = [asyncio.create_task(self._stream(client, number, tokens)) for number in range(count)]
            await asyncio.sleep(4)
            plug(worker, False)
            self.say(f"the network of the {worker} worker is cut")
            await asyncio.sleep(cut_for)
            plug(worker, True)
            self.say("and is back")
            for number, (received, gap) in enumerate(await asyncio.gather(*streams)):
                self.say(f"stream {number}: {received} of {tokens} tokens, longest pause {gap:.1f} s")
                assert received == tokens

    async def _stream(self, client: httpx.AsyncClient, number: int, tokens: int) -> tuple[int, float]:
        body = {"prompt": f"Story {number}: once", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        gap, received, last = 0.0, 0, time.monotonic()
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                gap, last = max(gap, time.monotonic() - last), time.monotonic()
                received = (event.get("usage") or {}).get("completion_tokens", received)
        return received, gap


def main(directory: Path, head: str) -> None:
    cluster = Cluster(directory, head)
    cluster.ray("up")
    cluster.say("ray up is done")
    cluster.wait_for_nodes(3, 240)
    print(cluster.on_head("COLUMNS=140 raydix doctor"))

    cluster.deploy("two-replicas.yaml")
    cluster.until(lambda: len(cluster.hosts_of_ranks()) == 2 and cluster.ready(), 240, "two replicas of TP 1 serve")
    cluster.say(f"ranks of each replica: {cluster.hosts_of_ranks()}")
    cluster.asks()
    asyncio.run(cluster.streams_over_a_cut(6, 120, cut_for=40))
    cluster.wait_for_nodes(3, 240)

    cluster.deploy("two-hosts.yaml")
    cluster.until(lambda: list(map(len, cluster.hosts_of_ranks())) == [3] and cluster.ready(), 240, "TP 3 serves")
    (ranks,) = cluster.hosts_of_ranks()
    cluster.say(f"ranks: {ranks}")
    assert len(set(ranks)) == 2
    cluster.asks()
    asyncio.run(cluster.streams_over_a_cut(3, 60, cut_for=40))
    cluster.asks()

    cluster.on_head("serve shutdown -y")
    filler = Path(__file__).with_name("ray_up_filler.py")
    lines = cluster.on_head(f"~/raydix-venv/bin/python {filler}").splitlines()
    cluster.say(next(line for line in lines if "one CPU less" in line))
    cluster.deploy("tiny-two-hosts.yaml")
    cluster.until(lambda: list(map(len, cluster.hosts_of_ranks())) == [2] and cluster.ready(), 240, "TP 2 serves")
    (ranks,) = cluster.hosts_of_ranks()
    cluster.say(f"ranks: {ranks}")
    assert len(set(ranks)) == 2
    assert cluster.continuation("once") == (Path(sys.argv[1]) / "tiny.txt").read_text()

    cluster.ray("down")
    cluster.say("ray down is done")
    cluster.until(lambda: not cluster.ready(), 60, "nothing serves any more")
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
