"""Clients that leave, engines that die, queues that are full."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import threading

import httpx
import psutil
import pytest

from tests.integration.http_server import events, running_server, until

LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(private_ray):
    lasting = {"health_check_period_s": 600}  # Serve does not replace the engine that the last test kills
    with running_server(lasting, max_running_requests=8, max_queued_requests=40, max_recoveries=0) as server:
        yield server


def aborted(server) -> int:
    """Streams that ended because their client left. (An engine that is idle may have finished them.)"""
    line = re.search(r'^raydix_\w+{[^}]*finished_reason="abort".*} (\d+)', server.get("/metrics").text, re.M)
    return int(line[1]) if line else 0


def test_a_streaming_client_that_leaves_ends_its_request(server):
    with server.client() as client, client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        stream = events(response)
        for _ in range(3):
            next(stream)
        assert server.stats()["running"] == 1
    until(lambda: aborted(server) == 1, 60)
    server.wait_idle()


def test_a_waiting_client_that_leaves_ends_its_request(server):
    before = aborted(server)
    body = json.dumps(LONG | {"n": 2}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 60) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        until(lambda: server.stats()["running"] == 2, 60)
    until(lambda: aborted(server) == before + 2, 60)
    server.wait_idle()


def test_a_full_queue_is_429_with_retry_after(server):
    async def flood():
        async with httpx.AsyncClient(
            base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=80)
        ) as client:
            tasks = [asyncio.create_task(client.post("/v1/completions", json=LONG)) for _ in range(60)]
            refused = []
            for answer in asyncio.as_completed(tasks):
                refused.append(await answer)
                if len(refused) == 12:  # of 60, 48 fit
                    break
            for task in tasks:
                task.cancel()
            return refused

    refused = asyncio.run(flood())
    assert {answer.status_code for answer in refused} == {429}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert refused[0].json()["error"]["type"] == "rate_limit_error"
    server.wait_idle()


def test_more_choices_than_there_can_be_places_are_400_at_once(server):
    for body, param in (({"n": 49}, "n"), ({"prompt": ["a"] * 49}, "prompt"), ({"prompt": ["a"] * 5, "n": 10}, "n")):
        answer = server.post("/v1/completions", LONG | body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
        assert "48 at most (max_running_requests 8 + max_queued_requests 40)" in answer.json()["error"]["message"]
        assert "retry-after" not in answer.headers
    chat = {"messages": [{"role": "user", "content": "a"}], "n": 49, "stream": True}
    assert server.post("/v1/chat/completions", chat).json()["error"]["param"] == "n"
    assert server.stats()["running"] == server.stats()["waiting"] == 0
    assert len(server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "n": 48}).json()["choices"]) == 48
    server.wait_idle()


def test_after_requests_with_random_aborts_every_page_is_back(server):
    rng = random.Random(5)
    total = server.wait_idle()["total_pages"]

    async def request(client, number):
        body = {
            "prompt": "word " * rng.randint(1, 120) + str(number % 20),
            "max_tokens": rng.randint(0, 40),
            "ignore_eos": True,
            "stream": rng.random() < 0.5,
            "n": rng.choice([1, 1, 1, 2]),
            "stop": rng.choice([None, "e"]),
        }
        leave = rng.random() * 1.5 if rng.random() < 0.6 else None

        async def answer():
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                return (await response.aread()).decode()

        try:
            return await asyncio.wait_for(answer(), leave)
        except asyncio.TimeoutError:
            return None

    async def everyone():
        limit = asyncio.Semaphore(20)
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def one(number):
                async with limit:
                    return await request(client, number)

            return await asyncio.gather(*(one(number) for number in range(80)))

    answers = asyncio.run(everyone())
    left = answers.count(None)
    assert 8 < left < 72
    assert not any('"error"' in answer for answer in answers if answer)
    stats = server.wait_idle()
    assert stats["free_pages"] + stats["cached_pages"] == total
    health = server.get("/health").json()
    assert (health["open_streams"], health["dropped_messages"]) == (0, 0)


def test_a_killed_worker_ends_every_stream_with_an_error(server):
    """It takes the engine down: only the next test may follow."""
    info = server.engine.info.remote().result(timeout_s=60)
    pids = [rank["pid"] for rank in info["ranks"]]
    waiting: list[httpx.Response] = []
    other = threading.Thread(target=lambda: waiting.append(server.post("/v1/completions", LONG)))
    other.start()
    with server.client() as client, client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        stream = events(response)
        for _ in range(3):
            next(stream)
        os.kill(pids[0], signal.SIGKILL)
        *_, last = stream  # ends, or else the client's own timeout does
    error = json.loads(last)["error"]
    assert (error["type"], error["code"]) == ("service_unavailable", "engine_dead")
    other.join(timeout=90)
    assert waiting[0].status_code == 503
    assert waiting[0].json()["error"]["code"] == "engine_dead"
    assert server.get("/ready").status_code == 503
    assert server.get("/health").json()["open_streams"] == 0
    assert server.post("/v1/completions", LONG).status_code == 503
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 60)
