"""What a recording says without being run: shapes, slots and times of its steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from cluster.flight.recording import Recording


def step_table(recording: Recording) -> list[dict[str, Any]]:
    """One row per step. Times are milliseconds: since the step before was sent, and to the answer (None: never came);
    `free_slots`: page starts that entered a page table in this step; `context`: the longest row's tokens."""
    rows, before = [], None
    for step in recording.steps:
        plan = step.plan
        lengths = plan.device_len[: plan.num_rows]
        rows.append(
            {
                "step": plan.step_id,
                "after_ms": None if before is None else round(1e3 * (step.sent - before), 3),
                "answer_ms": None if step.answered is None else round(1e3 * (step.answered - step.sent), 3),
                "decode": plan.num_decode,
                "prefill": plan.num_rows - plan.num_decode,
                "tokens": plan.num_tokens,
                "sampled": plan.num_samples,
                "admitted": len(plan.sampling),
                "pages": len(plan.page_deltas),
                "context": int(lengths.max()) if len(lengths) else 0,
                "bytes": 4 * len(step.buffer),
            }
        )
        before = step.sent
    return rows


def summary(recording: Recording) -> list[str]:
    """A few lines on the whole."""
    steps = recording.steps
    lines = [
        f"recorded {recording.created}: {recording.reason}",
        f"{'with' if recording.with_tokens else 'without'} token ids; snapshot of {len(recording.snapshot)} plans"
        + (f" (none: {recording.broken})" if recording.broken else ""),
        "workers: " + ", ".join(f"{name}={value}" for name, value in recording.engine.items()),
    ]
    if not steps:
        return [*lines, "no steps"]
    lines.append(f"steps {steps[0].plan.step_id} to {steps[-1].plan.step_id}")
    answered = [1e3 * (step.answered - step.sent) for step in steps if step.answered is not None]
    if answered:
        median, p99 = np.percentile(answered, [50, 99])
        lines.append(f"answers after {median:.2f} ms (median), {p99:.2f} ms (p99), {max(answered):.2f} ms (longest)")
    unanswered = [step.plan.step_id for step in steps if step.answered is None]
    if unanswered:
        lines.append(f"without an answer: steps {', '.join(map(str, unanswered))}")
    return lines
