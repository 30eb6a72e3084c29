"""Run by test_cycles: an engine with a private Ray, started and stopped again and again in one process."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

from cluster.llm import LLM
from scheduler.sampling_params import SamplingParams
from tests.chaos.load import CONFIG


def main(model: str, cycles: int) -> None:
    me = psutil.Process()
    settled: dict[str, int] = {}
    tokens: list[list[int]] = []
    for cycle in range(cycles):
        started = time.monotonic()
        with LLM(model, **(CONFIG | {"ray_address": "local"})) as llm:
            ready = time.monotonic() - started
            outputs = llm.generate([[5, 6, 7], [8, 9]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
            processes = me.children(recursive=True)
        assert len(processes) > 4
        _, alive = psutil.wait_procs(processes, timeout=20)
        assert not alive, [process.cmdline() for process in alive]
        tokens.append([output.token_ids for output in outputs])
        assert tokens[-1] == tokens[0]
        assert not files(), files()
        held = {"fds": me.num_fds(), "threads": me.num_threads(), "connections": len(me.net_connections("all"))}
        print(f"cycle {cycle + 1}: ready after {ready:.1f} s, stopped after {time.monotonic() - started:.1f} s; {held}")
        if cycle == 2:
            settled = held
    assert all(held[name] <= settled[name] + 3 for name in held), (settled, held)
    print("done")


def files() -> list[str]:
    """What this process has left in the places where it leaves something."""
    places = (Path(tempfile.gettempdir()).glob("raydix-*/session_*"), Path("/dev/shm").iterdir())
    pid = str(os.getpid())
    return [str(path) for place in places for path in place if path.name.endswith(pid)] + [
        str(path) for path in Path(tempfile.gettempdir(), "ray").glob(f"session_*_{pid}")
    ]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
