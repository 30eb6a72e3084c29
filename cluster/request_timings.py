"""How long requests wait, prefill and decode, as the engine sees it."""

from __future__ import annotations

import time
from typing import Any

from cluster.histogram import REQUEST_BOUNDS, Histogram
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.request import Request


class RequestTimings:
    """Follows every request from `submitted` to its finish.

    queue    from submission to the first admission, when it gets a row
    prefill  from there to the first token
    decode   from there to the last

    `submitted` may be called in any thread, the rest in the driver's. Python's cost per step is that of requests that
    start or finish in it, and while any request waits for its first token, a look at each entry.
    """

    def __init__(self) -> None:
        self._new: dict[int, tuple[Request, float]] = {}  # no token yet, and when they were submitted
        self._running: dict[int, float] = {}  # when their first token came
        self.queue = Histogram(REQUEST_BOUNDS)
        self.prefill = Histogram(REQUEST_BOUNDS)
        self.decode = Histogram(REQUEST_BOUNDS)
        self.prompt_tokens = 0
        self.generation_tokens = 0

    def submitted(self, request: Request) -> None:
        """The request is about to be queued."""
        self._new[request.request_id] = (request, time.monotonic())

    def step(self, outputs: StepOutputs) -> None:
        """Count a step's tokens, first tokens and finishes."""
        now = time.monotonic()
        self.generation_tokens += int((outputs.tokens >= 0).sum())
        if self._new:
            columns = (outputs.request_ids, outputs.tokens, outputs.finish)
            for request_id, token, finish in zip(*(column.tolist() for column in columns), strict=True):
                if request_id in self._new:
                    # max_tokens 0 ends with LENGTH and no token
                    self._started(*self._new.pop(request_id), now, token >= 0 or finish == FinishReason.LENGTH)
        if outputs.finish.any():
            for request_id in outputs.request_ids[outputs.finish != FinishReason.NONE].tolist():
                began = self._running.pop(request_id, None)
                if began is not None:
                    self.decode.observe(now - began)

    def _started(self, request: Request, submitted: float, now: float, prefilled: bool) -> None:
        """The first that is heard of a request: its first token, or its end before any."""
        self.queue.observe((request.admitted_at or now) - submitted)
        if prefilled and request.admitted_at is not None:
            self.prefill.observe(now - request.admitted_at)
            self.prompt_tokens += request.prompt_len
            self._running[request.request_id] = now

    def snapshot(self) -> dict[str, Any]:
        """Totals and histograms as plain values."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "queue_seconds": self.queue.snapshot(),
            "prefill_seconds": self.prefill.snapshot(),
            "decode_seconds": self.decode.snapshot(),
        }
