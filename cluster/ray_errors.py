"""Ray's errors in one line: they come as several paragraphs, of which one sentence says what happened."""

from __future__ import annotations

import re

import ray


def explain(error: BaseException) -> str:
    """What happened to a task or actor, without Ray's ids, advice and stack traces."""
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return "no answer in time"
    if isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None:
        return f"{type(error.cause).__name__}: {error.cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    reason = next((line for line in lines if line.startswith("The actor is dead because")), None)
    if reason is None:  # an exception in the constructor ends the text; otherwise it begins with the point
        return lines[-1] if "creation task" in lines[0] else lines[0]
    if "Worker unexpectedly exits with a connection error" in reason:
        return "its process was killed or crashed (a signal, the kernel's out-of-memory killer, a segmentation fault)"
    detail = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", reason)
    return detail[1] if detail else reason.removeprefix("The actor is dead because ").rstrip(".")
