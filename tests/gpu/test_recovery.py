"""On real cards: streams outlive the kill -9 of a rank, and its memory is free before others start.

pytest -s tests/gpu/test_recovery.py      prints where the time of each pause went
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch

from cluster import spare_ranks
from cluster.worker_group import WorkerGroup
from scheduler.outputs import FinishReason
from tests.chaos.load import Load, Pause, Stream, running
from tests.checkpoints import load_reference
from tests.references import score_gap

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("private_ray"),
    pytest.mark.timeout(900),
]

STREAMS = 16
CONTEXT_BYTES = 64 << 20  # less than what a process takes that has as much as started CUDA
# settings, and the cards that they need
PLACES = {
    "one rank": ({"tp_size": 1}, 1),
    "two ranks on a card, gloo": ({"tp_size": 2, "gpus_per_rank": 0.5}, 1),
    "two cards, NCCL": ({"tp_size": 2}, 2),
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> dict[str, object]:
    settings, cards = PLACES[request.param]
    if torch.cuda.device_count() < cards:
        pytest.skip(f"needs {cards} CUDA devices, this machine has {torch.cuda.device_count()}")
    return {"device": "cuda", **settings}


def used() -> int:
    """Bytes in use on all cards, by whomever."""
    free_and_total = [torch.cuda.mem_get_info(card) for card in range(torch.cuda.device_count())]
    return sum(total - free for free, total in free_and_total)


@pytest.fixture
def used_after_stop(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes in use whenever all ranks of a group have been ended; spare ranks live then. Those start at once."""
    seen: list[int] = []
    stop_ranks = WorkerGroup.stop_ranks

    def stop_and_look(group: WorkerGroup, grace: float = 0.0) -> None:
        stop_ranks(group, grace)
        seen.append(used())

    monkeypatch.setattr(WorkerGroup, "stop_ranks", stop_and_look)
    monkeypatch.setattr(spare_ranks, "DELAY", 0.0)
    return seen


def start(load: Load) -> None:
    print("\ncold start: " + ", ".join(f"{p} {s:.2f}" for p, s in load.engine.info.startup_seconds.items()))


def kill(load: Load, rank: int, idle: int, used_after_stop: list[int]) -> list[Stream]:
    """Every prompt once, with the kill of a rank in the middle. `idle`: bytes in use without this group."""
    deadline = time.monotonic() + 120
    while not load.engine._group.spares_ready:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    recoveries = load.engine.metrics()["recoveries"]
    streams = [load.submit(number) for number in range(STREAMS)]
    load.wait(lambda: all(len(stream.tokens) >= 20 for stream in streams))
    assert not any(stream.finish for stream in streams)
    used_after_stop.clear()
    serving = used() - idle
    killed = time.monotonic()
    os.kill(load.engine.info.ranks[rank].pid, signal.SIGKILL)
    load.wait(lambda: all(stream.finish for stream in streams), 600)
    assert load.engine.metrics()["recoveries"] == recoveries + 1
    recovery = load.engine.last_recoveries[-1]
    assert "placement" not in recovery.phases, "the spare ranks did not take over"
    (stopped,) = (seen - idle for seen in used_after_stop)
    pause = Pause.of(killed, recovery, [stream for stream in streams if stream.times[-1] > recovery.ready])
    print(f"rank {rank}: {', '.join(f'{name} {value:.2f}' for name, value in asdict(pause).items())}; {recovery}")
    print(f"MiB in use: {serving >> 20} while serving, {stopped >> 20} after the ranks' end")
    assert stopped < CONTEXT_BYTES < serving
    return streams


def test_texts_are_those_of_an_undisturbed_run(
    tiny_llama: Path, place: dict[str, object], used_after_stop: list[int]
) -> None:
    """In float32; a first difference counts only where the two tokens' scores are no tie."""
    idle = used()
    with running(Load(tiny_llama, count=STREAMS, lengths=(150, 190), dtype="float32", **place)) as load:
        start(load)
        expected = load.run_once()
        for rank in reversed(range(place["tp_size"])):
            kill(load, rank, idle, used_after_stop)
        reference = load_reference(tiny_llama)
        streams = load.check(expected, partial(score_gap, reference))
        print(f"{streams} streams, {load.ties} ties")


def test_the_pause_of_a_real_models_shape(place: dict[str, object], used_after_stop: list[int]) -> None:
    """Random weights in bfloat16, so texts may differ; prints the phases of the pause next to those of the start."""
    idle = used()
    shape = {"load_format": "dummy", "page_size": 16, "num_pages": None, "max_seq_len": 4096, "max_step_tokens": 2048}
    load = Load(Path("Qwen3-0.6B"), count=STREAMS, lengths=(300, 400), gpu_memory_utilization=0.5, **shape, **place)
    with running(load):
        start(load)
        load.run_once()
        streams = kill(load, 0, idle, used_after_stop)
        for stream in streams:
            assert stream.finish == FinishReason.LENGTH and len(stream.tokens) == load.lengths[stream.number]
