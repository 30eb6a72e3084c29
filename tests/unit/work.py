"""Work as a count, which is the same however slow the machine is: tests never compare times."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType


def lines_run(call: Callable[[], object]) -> int:
    """Python lines that `call` executes, those of all it calls included; none of others' garbage."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Callable:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return lines


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that `call` holds at once, Python's and numpy's; the least of three times: threads count."""
    return min(_peak_bytes(call) for _ in range(3))


def _peak_bytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
