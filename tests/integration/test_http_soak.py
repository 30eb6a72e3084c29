"""1,000 requests, 32 at a time, a third of which leave at a random moment: the server is as it was before."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import httpx
import psutil
import pytest

from tests.integration.http_server import Server, running_server

WARM_UP, REQUESTS, AT_ONCE = 1_000, 1_000, 32
SLACK_BYTES = 48 << 20  # of a process: allocators keep what they had at their busiest moment
SLACK_SOCKETS = 4  # idle keep-alive connections between the proxy and the replicas


@pytest.mark.full_grid
@pytest.mark.timeout(1800)
def test_a_thousand_requests_leave_nothing_behind(private_ray) -> None:
    with running_server(max_running_requests=32) as server:
        touch_every_page(server)
        asyncio.run(load(server.url, WARM_UP, seed=1))
        server.wait_idle()
        before = processes()
        latencies = asyncio.run(load(server.url, REQUESTS, seed=2))
        server.wait_idle()
        time.sleep(5)  # connections of clients that left are closed
        after = processes()
        health = server.get("/health").json()
    latencies.sort()
    p50, p99 = (latencies[int(len(latencies) * share)] * 1e3 for share in (0.5, 0.99))
    print(f"/health answered {len(latencies)} times: p50 {p50:.0f} ms, p99 {p99:.0f} ms")
    print(*(f"{name}: {before.get(name)} -> {now}" for name, now in after.items()), sep="\n")
    assert (health["open_streams"], health["dropped_messages"]) == (0, 0)
    assert before.keys() == after.keys()
    for name, (memory, sockets) in after.items():
        assert memory - before[name][0] < SLACK_BYTES, name
        assert sockets - before[name][1] <= SLACK_SOCKETS, name


def touch_every_page(server: Server) -> None:
    """Memory of the KV pool counts from a page's first use on: use all."""
    for number in range(100):
        if server.stats()["free_pages"] < 16:
            return
        prompt = [1 + (number * 977 + position) % 40_000 for position in range(900)]
        assert server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).status_code == 200
    raise AssertionError(f"the pool does not fill up: {server.stats()}")


def processes() -> dict[str, tuple[int, int]]:
    """Resident bytes and open sockets of the server's processes: replicas, proxy and ranks, by title and pid."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        title = " ".join(child.cmdline()[:1])
        if title.startswith(("ray::ServeReplica", "ray::Proxy", "ray::RankActor")):
            found[f"{title.split('.')[0]} {child.pid}"] = (child.memory_info().rss, len(child.net_connections("inet")))
    assert len(found) >= 4, found
    return found


async def load(url: str, count: int, seed: int) -> list[float]:
    """Run the requests; the seconds that each call of /health took meanwhile, one every tenth of a second."""
    rng = random.Random(seed)
    latencies: list[float] = []
    done = asyncio.Event()
    limit = asyncio.Semaphore(AT_ONCE)

    async def watch(client: httpx.AsyncClient) -> None:
        while not done.is_set():
            started = time.perf_counter()
            assert (await client.get("/health")).status_code == 200
            latencies.append(time.perf_counter() - started)
            await asyncio.sleep(0.1)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        body = {
            "prompt": "word " * rng.randint(1, 150) + str(number % 30), "max_tokens": rng.randint(1, 24),
            "ignore_eos": True, "stream": rng.random() < 0.7, "n": rng.choice([1, 1, 1, 2]),
        }  # fmt: skip
        leave = rng.random() * 3 if rng.random() < 1 / 3 else None

        async def answer() -> None:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                text = (await response.aread()).decode()
                assert response.status_code == 200 and '"error":' not in text, text

        async with limit:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(answer(), leave)

    connections = httpx.Limits(max_connections=AT_ONCE + 8)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=connections) as client:
        watcher = asyncio.create_task(watch(client))
        await asyncio.gather(*(one(client, number) for number in range(count)))
        done.set()
        await watcher
    return latencies
