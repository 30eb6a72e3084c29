"""The command as a user runs it: real processes, the default model, exit codes, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.default_model import NAME

READY_SECONDS = 200
SMALL = ["--device", "cpu", "--ray-address", "local", "--num-pages", "256", "--max-seq-len", "2048"]
SMALL += ["--max-running-requests", "8"]
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


class ServeProcess:
    """`raydix serve` on a free port, with everything it writes and every process it starts."""

    def __init__(self, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-c", "import sys; from cluster.cli import main; sys.exit(main())"]
        command += ["serve", "--port", str(self.port), "--no-spare-ranks", *SMALL, *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("try it:"):
                self._ready.set()
        self._ready.set()  # it ended

    def wait_ready(self) -> None:
        assert self._ready.wait(READY_SECONDS) and self.process.poll() is None, self.log[-4000:]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def ranks(self) -> list[psutil.Process]:
        return [child for child in self.children() if child.name().startswith("ray::RankActor")]

    def wait(self, seconds: float) -> int:
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

    def clear(self) -> None:
        """After a test: what it left running if it failed, and the logs that are kept when an engine fails."""
        if self.process.poll() is None:
            for process in [*self.children(), self.process]:
                process.kill()
            self.process.wait()
        for session in directories(self.process.pid):
            shutil.rmtree(session.parent)


@pytest.fixture
def start() -> Iterator[type]:
    """Starts servers; whatever is still running at the end is killed."""
    started: list[ServeProcess] = []

    def start_one(*flags: str) -> ServeProcess:
        started.append(ServeProcess(*flags))
        return started[-1]

    yield start_one
    for server in started:
        server.clear()


def assert_all_ended(processes: list[psutil.Process], seconds: float = 60) -> None:
    """None of these runs any more (they may be orphans by now)."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive, [process.cmdline() for process in alive]


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def directories(pid: int) -> list[Path]:
    """Of the private Ray of this process: its session's name ends with the pid."""
    return list(Path(tempfile.gettempdir()).glob(f"raydix-ray-*/session_*_{pid}"))


def ask(url: str, **body: object) -> dict:
    response = httpx.post(f"{url}/v1/chat/completions", json={"messages": FRANCE, **body}, timeout=180)
    assert response.status_code == 200, response.text
    return response.json()


def test_serve_three_workers_answers_and_stops_cleanly(start):
    server = start("--tp-size", "3", "--drain-timeout", "150")
    server.wait_ready()
    assert "served_model_name=" + NAME in server.log and "num_pages=256" in server.log
    assert len(server.ranks()) == 3
    answer = ask(server.url, temperature=0, max_tokens=32)
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert answer["choices"][0]["finish_reason"] == "stop"
    curl = re.search(r"curl (http://\S+) .* -d '(.*)'$", server.log, re.MULTILINE)
    example = httpx.post(curl[1], json=json.loads(curl[2]) | {"max_tokens": 4}, timeout=60)
    assert example.status_code == 200

    processes = server.children()
    finishing = ThreadPoolExecutor().submit(ask, server.url, temperature=0, max_tokens=80, min_tokens=80)
    until(lambda: httpx.get(f"{server.url}/ready", timeout=60).json()["stats"]["running"] == 1)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{server.url}/ready", timeout=60).status_code == 503)
    refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=60)
    assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
    assert "stopping" in refused.json()["error"]["message"]
    assert finishing.result(240)["usage"]["completion_tokens"] == 80
    assert server.wait(180) == 0
    assert server.log.rstrip().endswith("raydix: stopped")
    assert_all_ended(processes)
    assert not directories(server.process.pid)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0


@pytest.mark.full_grid
def test_killed_worker_ends_stream_and_server_with_the_reason(start):
    server = start("--max-recoveries", "0")
    server.wait_ready()
    processes = server.children()
    (rank,) = server.ranks()
    body = {"messages": FRANCE, "stream": True, "max_tokens": 1500, "min_tokens": 1400, "seed": 1}
    events: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            events.append(line)
            if len(events) == 20:
                os.kill(rank.pid, signal.SIGKILL)
    error = json.loads([line for line in events if line][-1].removeprefix("data: "))["error"]
    assert error["code"] == "engine_dead" and f"rank 0 (pid {rank.pid}" in error["message"]

    assert server.wait(60) == 1
    last = server.log.rstrip().splitlines()[-1]
    assert last.startswith("raydix: error: the engine has failed: rank 0") and "died" in last
    assert re.search(
        rf"logs are kept in {directories(server.process.pid)[0].parent}/session_latest/logs$", server.log, re.M
    )
    assert_all_ended(processes)


@pytest.mark.full_grid
def test_interrupt_while_starting(start):
    server = start()
    deadline = time.monotonic() + READY_SECONDS
    while "loading the model" not in server.log:
        assert time.monotonic() < deadline and server.process.poll() is None, server.log
        time.sleep(0.1)
    processes = server.children()
    server.process.send_signal(signal.SIGINT)
    assert server.wait(60) == 0
    assert_all_ended(processes)


@pytest.mark.full_grid
def test_wrong_tp_size_is_one_clear_line_and_exit_code_2(start):
    server = start("--tp-size", "2")
    assert server.wait(READY_SECONDS) == 2
    last = server.log.rstrip().splitlines()[-1]
    assert last.startswith("raydix: error: ") and last.endswith("sizes that work are 1, 3")


def test_generate(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-c", "import sys; from cluster.cli import main; sys.exit(main())", "generate", "--chat"]
    command += ["--temperature", "0", "--max-tokens", "16", "--json", str(out), *SMALL]
    prompts = "What is the capital of France?\nWhat is the capital of Italy?\n"
    done = subprocess.run(command, input=prompts, capture_output=True, text=True, timeout=READY_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "--- What is the capital of France?\nThe capital of France is Paris.\n" in done.stdout
    result = json.loads(out.read_text())
    assert [output["prompt"] for output in result["outputs"]] == prompts.splitlines()
    first = result["outputs"][0]
    assert first["text"] == "The capital of France is Paris." and first["finish_reason"] == "stop"
    assert first["token_ids"][-1] == 2 and len(first["prompt_token_ids"]) == 37
    assert result["config"]["num_pages"] == 256 and result["sampling"]["temperature"] == 0


def test_generate_that_outgrows_the_cache_says_so(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-c", "import sys; from cluster.cli import main; sys.exit(main())", "generate"]
    command += ["--device", "cpu", "--executor", "inproc", "--num-pages", "4", "--max-seq-len", "512"]
    command += ["--max-tokens", "200", "--temperature", "0", "--ignore-eos", "--logit-bias", '{"7042": -100}']
    command += ["--logprobs", "2", "--prompt-logprobs", "1", "--json", str(out), "The capital of France is"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=READY_SECONDS)
    assert done.returncode == 1 and "Paris" not in done.stdout
    last = done.stderr.rstrip().splitlines()[-1]
    (output,) = json.loads(out.read_text())["outputs"]
    assert last == f"raydix: error: {output['error']}" and "raise num_pages" in last
    assert output["finish_reason"] == "error" and len(output["token_ids"]) == len(output["logprobs"]) == 60
    for token, scored in zip(output["token_ids"], output["logprobs"], strict=True):
        assert scored[str(token)]["logprob"] <= 0 and {each["rank"] for each in scored.values()} >= {1, 2}
    assert output["prompt_logprobs"][0] is None and len(output["prompt_logprobs"]) == 5


@pytest.mark.full_grid
def test_bench_throughput(tmp_path):
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        "-c",
        "import sys; from cluster.cli import main; sys.exit(main())",
        "bench",
        "throughput",
    ]
    command += ["--num-seqs", "4", "--min-len", "4", "--max-len", "8", "--repeats", "2", "--json", str(out), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=READY_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "tok/s" in done.stdout and "limit" in done.stdout
    result = json.loads(out.read_text())
    names = {"output_tokens_per_s", "total_tokens_per_s", "elapsed_s", "num_requests", "cached_tokens", "config"}
    assert names <= result.keys()
    assert result["num_requests"] == 4 and len(result["runs"]) == 2 and result["limit"]["ratio"] > 0
    assert result["config"]["dtype"] == "float32" and result["config"]["device"] == "cpu"
    rate = result["workload"]["output_tokens"] / result["elapsed_s"]
    assert result["output_tokens_per_s"] == pytest.approx(rate)
