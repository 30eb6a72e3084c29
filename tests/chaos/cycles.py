"""Run by test_cycles: engines started and stopped again and again in one process; what is left is counted.

`engines`: within one Ray, so that all that is left is ours. `rays`: each with a private Ray, after as many plain
`ray.init(); ray.shutdown()` in the same process, which leave something themselves.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import ray

from cluster.llm import LLM
from scheduler.sampling_params import SamplingParams
from tests.chaos.load import CONFIG

SETTLED = 3  # cycles, until what is made once per process has been made
STORE = 128 << 20
SLACK = 2  # of what Ray leaves, more or less; one of ours in each cycle would be more
EXPECTED: list[list[list[int]]] = []


def engines(model: str, cycles: int) -> None:
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=STORE, log_to_driver=False)
    counts = repeat(cycles, lambda: use_engine(model, "auto"))
    assert counts[-1] == counts[SETTLED - 1], (counts[SETTLED - 1], counts[-1])
    ray.shutdown()


def rays(model: str, cycles: int) -> None:
    plain = growth(repeat(cycles, start_ray))
    ours = growth(repeat(cycles, lambda: use_engine(model, "local")))
    print(f"left by {cycles - SETTLED} cycles of a plain Ray: {plain}; of an engine with its own: {ours}")
    assert all(ours[name] <= plain[name] + SLACK for name in ours)


def start_ray() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=STORE, log_to_driver=False)
    ray.shutdown()


def use_engine(model: str, address: str) -> None:
    with LLM(model, **(CONFIG | {"ray_address": address})) as llm:
        outputs = llm.generate([[5, 6, 7], [8, 9]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        ranks = [rank.pid for rank in llm.info.ranks]
    assert not any(psutil.pid_exists(pid) for pid in ranks)
    EXPECTED.append([output.token_ids for output in outputs])
    assert EXPECTED[-1] == EXPECTED[0]


def repeat(cycles: int, cycle: Callable[[], None]) -> list[dict[str, int]]:
    """What there is after each cycle."""
    counts: list[dict[str, int]] = []
    for number in range(1, cycles + 1):
        started = time.monotonic()
        cycle()
        counts.append(settle(counts[SETTLED - 1] if number > SETTLED else None))
        print(f"cycle {number}: {time.monotonic() - started:.1f} s, {counts[-1]}", flush=True)
    return counts


def settle(wanted: dict[str, int] | None) -> dict[str, int]:
    """What this process has now; waits a while for it to become what is wanted, since Ray ends some things later."""
    deadline = time.monotonic() + 20
    while True:
        gc.collect()
        held = count()
        if wanted is None or held == wanted or time.monotonic() > deadline:
            return held
        time.sleep(0.5)


def count() -> dict[str, int]:
    me = psutil.Process()
    names = [name for name in map(name_of, me.children(recursive=True)) if name.startswith("ray::RankActor")]
    return {
        "ranks": len(names),
        "children": len(me.children()),
        "threads": me.num_threads(),
        "fds": me.num_fds(),
        "connections": len(me.net_connections("all")),
        "files": len(files()),
    }


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def files() -> list[Path]:
    """Directories, sockets and shared memory; the temporary directory is this process's own."""
    temporary = Path(tempfile.gettempdir())
    return [*temporary.iterdir(), *temporary.glob("ray/session_2*"), *Path("/dev/shm").glob(f"*{os.getpid()}*")]


def growth(counts: list[dict[str, int]]) -> dict[str, int]:
    return {name: counts[-1][name] - counts[SETTLED - 1][name] for name in counts[-1]}


if __name__ == "__main__":
    {"engines": engines, "rays": rays}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
    print("done")
