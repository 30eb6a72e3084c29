"""`--profile`: a trace of a window in the middle of a run, for a trace viewer, and how busy the GPU was in it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


def trace_window(path: Path, work: Callable[[], object], after: float, seconds: float) -> float | None:
    """Run `work`, write a trace of `seconds` of it, beginning `after` seconds, to `path` (Chrome's trace format).

    Returns:
        The share of the window in which the GPU was busy, from its first to its last activity; None without a GPU.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    failure: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="profiled run")
    on_gpu = torch.cuda.is_available()
    thread.start()
    thread.join(after)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        thread.join(seconds)
    thread.join()
    if failure:
        raise failure[0]
    profiler.export_chrome_trace(str(path))
    return busy_share(json.loads(path.read_text())["traceEvents"])


def busy_share(events: list[dict[str, Any]]) -> float | None:
    """Share of the time from the first to the last GPU activity that is covered by at least one; None if there is none.

    `events` as in Chrome's trace format: `cat`, `ts` and `dur` in microseconds.
    """
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in _GPU_CATEGORIES and "dur" in e)
    if not spans:
        return None
    first, covered, busy = spans[0][0], spans[0][0], 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return busy / (covered - first) if covered > first else None
