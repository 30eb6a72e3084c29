"""Life and death of a group: start, stop, start again; ranks that die, hang or throw; a driver that is killed."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from cluster.driver import Driver
from cluster.errors import EngineClosedError, EngineDeadError, EngineError, ModelLoadError, StartupError
from cluster.progress import no_progress
from cluster.recovery import StartBudget
from cluster.timeline import Timeline
from cluster.worker_group import WorkerGroup
from scheduler.config import SchedulerConfig
from scheduler.outputs import StepOutputs
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.integration.fakes import MAX_SEQ_LEN, VOCAB_SIZE, Faults, fake_group_config

ROWS, PAGE_SIZE, STEP_TOKENS = 8, 16, 64


def make_group(tp_size: int = 2, faults: Faults = Faults()) -> WorkerGroup:  # noqa: B008
    return WorkerGroup(
        fake_group_config(tp_size, faults, page_size=PAGE_SIZE, max_running_requests=ROWS, max_step_tokens=STEP_TOKENS)
    )


class Service:
    """A started group with a scheduler and a driver around it."""

    def __init__(self, group: WorkerGroup, step_timeout: float = 30.0, budget: StartBudget | None = None) -> None:
        self.group = group
        self.info = group.start(Timeline(no_progress))
        config = SchedulerConfig(self.info.num_pages, PAGE_SIZE, ROWS, MAX_SEQ_LEN, STEP_TOKENS)
        self.scheduler = Scheduler(config)
        self.arrivals: queue.SimpleQueue[StepOutputs | EngineError] = queue.SimpleQueue()
        self.driver = Driver(group, self.scheduler, step_timeout, 1, self.arrivals.put, self.arrivals.put, budget)
        self.driver.start()

    def submit(self, request_id: int, prompt: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, seed=request_id, ignore_eos=True)
        request = Request(request_id, np.array(prompt), sampling)
        self.driver.post(lambda: self.scheduler.add(request))

    def collect(self, count: int) -> dict[int, list[int]]:
        """Tokens of `count` requests, when all have finished."""
        tokens: dict[int, list[int]] = {}
        while count:
            arrival = self.arrivals.get(timeout=60)
            assert isinstance(arrival, StepOutputs), arrival
            for request_id, token in zip(arrival.request_ids.tolist(), arrival.tokens.tolist(), strict=True):
                tokens.setdefault(request_id, []).append(token)
            count -= int(np.count_nonzero(arrival.finish))
        return tokens

    def failure(self, timeout: float) -> EngineError:
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            arrival = self.arrivals.get(timeout=left)
            if isinstance(arrival, EngineError):
                return arrival
        raise AssertionError(f"no failure within {timeout} s")

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.info.ranks]


def generate(group: WorkerGroup) -> dict[int, list[int]]:
    """Start, run a few requests, stop."""
    service = Service(group)
    for number in range(1, 13):
        service.submit(number, list(range(number, 3 * number + 40)), 20)
    tokens = service.collect(12)
    service.driver.close()
    assert_gone(service.pids)
    return tokens


def assert_gone(pids: list[int], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while alive := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, f"still running: {[psutil.Process(pid) for pid in alive]}"
        time.sleep(0.02)


@pytest.mark.usefixtures("private_ray")
class TestGroup:
    def test_it_generates_and_leaves_nothing_behind(self) -> None:
        tokens = generate(make_group())
        assert sorted(tokens) == list(range(1, 13))
        assert all(len(row) == 20 and min(row) >= 0 and max(row) < VOCAB_SIZE for row in tokens.values())
        deadline = time.monotonic() + 60
        while ray.available_resources().get("CPU") != 8:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def test_it_starts_again_in_the_same_process_with_the_same_tokens(self) -> None:
        pid, group = os.getpid(), make_group()
        first = generate(group)
        ranks = group.info.ranks
        assert generate(group) == first
        assert not {rank.pid for rank in ranks} & {rank.pid for rank in group.info.ranks}
        assert os.getpid() == pid

    def test_streams_go_on_over_a_new_group_in_the_place_recovery_will_take(self) -> None:
        undisturbed = Service(make_group())
        undisturbed.submit(1, list(range(1, 60)), 300)
        undisturbed.submit(2, list(range(30, 50)), 300)
        expected = undisturbed.collect(2)
        undisturbed.driver.close()

        service = Service(make_group())
        before = service.pids

        def replace_group() -> None:
            service.group.stop(grace=0.0)
            service.info = service.group.start(Timeline(no_progress))
            service.scheduler.recover()
            service.driver._in_flight.clear()

        service.submit(1, list(range(1, 60)), 300)
        service.submit(2, list(range(30, 50)), 300)
        wait_until(lambda: service.driver.steps > 20)
        service.driver.post(replace_group)
        assert service.collect(2) == expected
        assert not set(before) & set(service.pids)
        assert_gone(before)
        service.driver.close()

    def test_a_missing_tensor_is_said_once_and_as_what_it_is(self) -> None:
        group = make_group(faults=Faults(load_error=1))
        with pytest.raises(ModelLoadError, match=r"no tensor model\.norm\.weight"):
            group.start(Timeline(no_progress))

    def test_a_start_up_error_says_rank_phase_and_cause(self) -> None:
        group = make_group(faults=Faults(load_crash=1))
        with pytest.raises(StartupError, match=r"rank 1 on .* failed in phase 'load': RuntimeError: something broke"):
            group.start(Timeline(no_progress))

    def test_a_rank_that_never_gets_ready_is_named_when_time_is_up(self) -> None:
        group = make_group(faults=Faults(load_hang=0))
        group.config = replace(group.config, start_timeout=45.0)
        with pytest.raises(StartupError, match=r"not ready within 45 s .*: rank 0 on .* in phase 'load'"):
            group.start(Timeline(no_progress))

    def test_a_rank_that_is_killed_during_start_up(self) -> None:
        group = make_group(faults=Faults(load_hang=0))

        def kill() -> None:
            wait_until(lambda: bool(group._runs), timeout=60)
            os.kill(group._ranks[1].pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(StartupError, match=r"rank 1 on .* failed in phase '.*': its process was killed or crashed"):
            group.start(Timeline(no_progress))
        killer.join()

    @pytest.mark.parametrize("rank", [0, 1])
    def test_kill_9_of_a_rank_fails_everything(self, rank: int) -> None:
        service = Service(make_group())
        service.submit(1, list(range(1, 60)), 400)
        service.arrivals.get(timeout=60)
        os.kill(service.pids[rank], signal.SIGKILL)
        error = service.failure(60.0)  # it takes some 30 ms
        assert isinstance(error, EngineDeadError)
        assert f"rank {rank} (pid {service.pids[rank]}" in str(error)
        assert_gone(service.pids)
        assert service.driver.failure is error

    def test_kill_9_of_a_rank_of_an_idle_group_is_noticed(self) -> None:
        service = Service(make_group())
        os.kill(service.pids[1], signal.SIGKILL)
        assert "rank 1" in str(service.failure(60.0))
        assert_gone(service.pids)

    def test_a_stopped_rank_is_found_by_the_watchdog_and_killed(self) -> None:
        service = Service(make_group(), step_timeout=10.0)
        service.submit(1, list(range(1, 60)), 400)
        service.arrivals.get(timeout=60)
        os.kill(service.pids[0], signal.SIGSTOP)
        error = service.failure(60.0)
        assert "a rank hangs" in str(error)
        assert_gone(service.pids)

    def test_a_stopped_rank_of_an_idle_group_is_found_by_the_probe(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("cluster.driver.PROBE_INTERVAL", 0.3)
        service = Service(make_group(), step_timeout=10.0)
        for _ in range(2):  # probes are answered
            before = service.driver.last_progress
            wait_until(lambda before=before: service.driver.last_progress > before, 60)
        assert service.driver.failure is None
        os.kill(service.pids[1], signal.SIGSTOP)
        error = service.failure(60.0)
        assert "ranks that did not answer: 1" in str(error)
        assert_gone(service.pids)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_an_exception_in_a_step_is_reported_with_its_cause(self, rank: int) -> None:
        service = Service(make_group(faults=Faults(rank=rank, step=3)))
        service.submit(1, list(range(1, 60)), 400)
        error = service.failure(60.0)
        assert str(error) == f"rank {rank} failed in phase 'serving': RuntimeError: forward failed"
        assert_gone(service.pids)

    def test_closing_with_unfinished_requests_says_so(self) -> None:
        service = Service(make_group())
        service.submit(1, list(range(1, 60)), 400)
        service.arrivals.get(timeout=60)
        service.driver.close()
        assert isinstance(service.failure(60.0), EngineClosedError)
        assert_gone(service.pids)


CHILD = """
import sys, time, ray
sys.path.insert(0, {root!r})
from cluster.progress import no_progress
from tests.integration.test_liveness import Service, make_group
ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=128 << 20, log_to_driver=False)
service = Service(make_group())
service.submit(1, list(range(1, 60)), {tokens})
directory = service.group._transport.addresses[0].endpoint.removeprefix("ipc://").rsplit("/", 1)[0]
print(*service.pids, directory, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("tokens", [400, pytest.param(1, marks=pytest.mark.full_grid)], ids=["serving", "idle"])
def test_a_killed_driver_leaves_no_rank_and_no_directory(tokens: int) -> None:
    root = str(Path(__file__).parents[2])
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(root=root, tokens=tokens)], stdout=subprocess.PIPE, text=True, cwd=root
    )
    try:
        *pids, directory = child.stdout.readline().split()
        ranks = [int(pid) for pid in pids]
        assert len(ranks) == 2 and all(psutil.pid_exists(pid) for pid in ranks)
        os.kill(child.pid, signal.SIGKILL)
        child.wait(10)
        assert_gone(ranks)
        wait_until(lambda: not Path(directory).exists())
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def wait_until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
