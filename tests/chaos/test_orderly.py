"""Stops and updates under Ray Serve, and `raydix serve` that is killed or whose Ray is. By hand: each is a start."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest
from ray import serve

from cluster.serve import build_openai_app
from tests.chaos.http_streams import COMMON, REQUESTS, Reader, start_all, wait_for_chunks
from tests.integration.http_server import CONFIG, Server, running_server, until
from tests.integration.test_cli import ServeProcess, assert_all_ended, directories

pytestmark = [pytest.mark.full_grid, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("private_ray")
class TestUnderServe:
    def test_an_update_loses_nothing(self) -> None:
        with running_server() as server:
            expected = [reader.result() for reader in start_all(server)]
            stop, finished, errors = threading.Event(), [], []

            def clients(number: int) -> None:
                while not stop.is_set():
                    reader = Reader(server, COMMON | REQUESTS[number], patient=True)
                    try:
                        finished.append(reader.result() == expected[number])
                    except AssertionError as error:
                        errors.append(error)

            threads = [threading.Thread(target=clients, args=(number,)) for number in range(len(REQUESTS))]
            for thread in threads:
                thread.start()
            time.sleep(3)
            pid = server.engine.info.remote().result(timeout_s=60)["driver_pid"]
            serve.run(build_openai_app(CONFIG | {"max_step_tokens": 200}), name="test", route_prefix="/")
            until(lambda: server.engine.info.remote().result(timeout_s=60)["driver_pid"] != pid, 120)
            time.sleep(3)
            stop.set()
            for thread in threads:
                thread.join(300)
            assert not errors and all(finished) and len(finished) >= 2 * len(REQUESTS), errors

    def test_what_does_not_end_in_time_gets_an_error_event(self) -> None:
        with running_server(drain_timeout=2) as server:
            reader = Reader(server, COMMON | REQUESTS[0] | {"max_tokens": 1000})
            wait_for_chunks([reader], 5)
            serve.delete("test", _blocking=False)
            reader.join(60)
            assert reader.error is None
            assert "did not end within 2 s" in reader.chunks[-1]["error"]["message"], reader.chunks[-1]


@pytest.fixture(scope="class")
def processes():
    started: list[ServeProcess] = []
    yield started
    for server in started:
        server.clear()


class TestCommand:
    def start(self, processes: list[ServeProcess]) -> tuple[ServeProcess, list[psutil.Process]]:
        server = ServeProcess()
        processes.append(server)
        server.wait_ready()
        return server, server.children()

    def stream(self, server: ServeProcess) -> None:
        """Opens a long stream."""
        body = {"prompt": "x", "stream": True, "max_tokens": 1500, "min_tokens": 1500}
        wait_for_chunks([Reader(Server(server.url, None), body)], 2)

    def test_a_second_signal_ends_it_at_once(self, processes: list[ServeProcess]) -> None:
        server, children = self.start(processes)
        self.stream(server)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "finishing what runs" in server.log, 60)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(60) == 128 + signal.SIGTERM  # the stream would take longer, and the grace period much longer
        assert_all_ended(children)

    def test_kill_9_leaves_no_process_and_the_next_start_removes_its_files(self, processes: list[ServeProcess]) -> None:
        server, children = self.start(processes)
        self.stream(server)
        assert directories(server.process.pid)
        os.kill(server.process.pid, signal.SIGKILL)
        server.wait(10)
        assert_all_ended(children, 150)  # Ray's agents try to tell its dead control store for a while
        following, children = self.start(processes)
        assert not directories(server.process.pid)
        following.process.send_signal(signal.SIGTERM)
        assert following.wait(60) == 0
        assert_all_ended(children)
        assert not directories(following.process.pid)

    def test_it_ends_soon_when_its_ray_dies(self, processes: list[ServeProcess]) -> None:
        server, children = self.start(processes)
        (raylet,) = (child for child in children if child.name() == "raylet")
        raylet.kill()
        assert server.wait(120) == 1
        assert "Ray has ended" in server.log.rstrip().splitlines()[-1]
        assert_all_ended(children)
