"""Histograms, and what the engine measures of requests."""

from __future__ import annotations

import time

import numpy as np
import pytest

from cluster.histogram import Histogram
from cluster.request_timings import RequestTimings
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams

NONE, STOP, LENGTH, ABORT, ERROR, POISON, INVALID = FinishReason


def test_values_fall_into_their_buckets():
    one, many = Histogram([1, 2, 5]), Histogram([1, 2, 5])
    values = [0.5, 1, 1.5, 5, 7, 100]
    for value in values:
        one.observe(value)
    many.observe_many(values)
    many.observe_many([])
    assert one.snapshot() == many.snapshot() == {"bounds": [1, 2, 5], "counts": [2, 1, 1, 2], "sum": 115.0}


def step(*entries):
    ids, tokens, finish = zip(*entries, strict=True)
    return StepOutputs(
        np.array(ids, dtype=np.int64),
        np.array(tokens, dtype=np.int32),
        np.array(finish, dtype=np.uint8),
        np.zeros(len(ids), dtype=np.int32),
    )


def counts(timings):
    snapshot = timings.snapshot()
    return {name: sum(snapshot[f"{name}_seconds"]["counts"]) for name in ("queue", "prefill", "decode")}


def test_a_request_is_followed_from_queue_to_finish():
    timings = RequestTimings()
    request = Request(7, np.arange(1, 6), SamplingParams(max_tokens=3, seed=0))
    timings.submitted(request)
    request.admitted_at = time.monotonic()
    timings.step(step((7, 11, NONE)))
    assert counts(timings) == {"queue": 1, "prefill": 1, "decode": 0}
    timings.step(step((7, 12, NONE)))
    timings.step(step((7, 13, LENGTH)))
    assert counts(timings) == {"queue": 1, "prefill": 1, "decode": 1}
    snapshot = timings.snapshot()
    assert (snapshot["prompt_tokens"], snapshot["generation_tokens"]) == (5, 3)


@pytest.mark.parametrize("finish", [ABORT, ERROR, INVALID])
def test_a_request_that_never_ran_has_waited_only(finish):
    timings = RequestTimings()
    timings.submitted(Request(7, np.arange(1, 6), SamplingParams(max_tokens=3, seed=0)))
    timings.step(step((7, -1, finish)))
    assert counts(timings) == {"queue": 1, "prefill": 0, "decode": 0}
    assert timings.snapshot()["prompt_tokens"] == timings.snapshot()["generation_tokens"] == 0
