"""Measures steps of the CPU engine and fits `CalibratedCost` to them.

The steps come from the scheduler itself: batches of 1 to 16 decodes at short and long contexts, prompts of 8 to 512
tokens, whole, in chunks and beside running decodes. Each workload runs several times and equal steps count once, with
the median of their times. Coefficients are fitted by least squares of relative errors, none below zero.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cluster.progress import Progress, no_progress
from cluster.simulate.cost_model import TERMS, CalibratedCost, StepShape
from cluster.simulate.real_engine import MeasuredWorker
from scheduler.config import SchedulerConfig
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

DECODE_STEPS = 5
KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Workload(NamedTuple):
    """Requests that are there from the start, and some that come after `delay` steps."""

    prompts: list[int]
    late_prompts: tuple[int, ...] = ()
    delay: int = 2


WORKLOADS = (
    *(Workload([12] * batch) for batch in (1, 2, 3, 4, 6, 8, 12, 16)),
    *(Workload([200] * batch) for batch in (1, 4, 8)),
    Workload([600]),
    *(Workload([length]) for length in (8, 24, 48, 96, 160, 320, 512)),
    Workload([100, 60, 30]),
    *(Workload([40] * running, (length,)) for running in (2, 6) for length in (20, 70, 180)),
    Workload([150] * 4, (400,)),
)


def measure(
    worker: MeasuredWorker, config: SchedulerConfig, vocab_size: int, repeats: int, progress: Progress = no_progress
) -> tuple[dict[StepShape, list[float]], float]:
    """(seconds of every step measured, by shape; median seconds the scheduler took beside a step).

    Workloads that do not fit `config` are left out.
    """
    rng = np.random.default_rng(0)
    seconds: dict[StepShape, list[float]] = {}
    host: list[float] = []
    runs = [load for load in WORKLOADS if fits(load, config)] * repeats
    for done, load in enumerate(runs):
        progress("measuring steps", done / len(runs))
        for shape, step, beside in _run(worker, config, vocab_size, load, rng):
            seconds.setdefault(shape, []).append(step)
            host.append(beside)
    return seconds, statistics.median(host)


def fits(load: Workload, config: SchedulerConfig) -> bool:
    prompts = [*load.prompts, *load.late_prompts]
    pages = sum(-(-(length + 4 * DECODE_STEPS) // config.page_size) for length in prompts)
    longest = max(prompts) + 4 * DECODE_STEPS
    return longest <= config.max_seq_len and pages <= config.num_pages and len(prompts) <= config.max_running_requests


def _run(
    worker: MeasuredWorker, config: SchedulerConfig, vocab_size: int, load: Workload, rng: np.random.Generator
) -> Iterator[tuple[StepShape, float, float]]:
    """(shape, its seconds, the scheduler's seconds) of each step of a workload, on an empty scheduler."""
    scheduler = Scheduler(config)
    # long enough that the early ones still decode when the late ones have been prefilled
    steps = DECODE_STEPS + (load.delay + 4 if load.late_prompts else 0)
    waiting = deque((0, length, steps) for length in load.prompts)
    waiting += ((load.delay, length, DECODE_STEPS) for length in load.late_prompts)
    number = 0
    while waiting or scheduler.has_work:
        while waiting and waiting[0][0] <= scheduler.stats().steps:
            _, length, max_tokens = waiting.popleft()
            sampling = SamplingParams(temperature=1.0, seed=number, max_tokens=max_tokens, ignore_eos=True)
            prompt = rng.integers(0, vocab_size, length, dtype=np.int32)
            scheduler.add(Request(number, prompt, sampling))
            number += 1
        started = time.thread_time()
        plan = scheduler.schedule()
        planning = time.thread_time() - started
        assert plan is not None, "one step at a time: a request always can go on"
        shape = StepShape.of(plan)
        result, seconds = worker.execute(plan)
        started = time.thread_time()
        scheduler.process(result)
        yield shape, seconds, planning + time.thread_time() - started


def fit(
    measured: dict[StepShape, list[float]], host_seconds: float, model: str, vocab_size: int, page_size: int
) -> CalibratedCost:
    """The cost model that fits the medians best, in relative error."""
    shapes = list(measured)
    seconds = np.array([statistics.median(measured[shape]) for shape in shapes])
    tokens = np.array([shape.tokens for shape in shapes], dtype=float)
    knots = [knot for knot in KNOTS if knot < tokens.max()]
    knots.append(int(tokens.max()))
    by_tokens = np.stack([np.interp(tokens, knots, np.eye(len(knots))[i]) for i in range(len(knots))], axis=1)
    by_term = np.array([[getattr(shape, term) for term in TERMS] for shape in shapes], dtype=float)
    features = np.concatenate([by_tokens, by_term], axis=1)
    found = nonnegative_least_squares(features / seconds[:, None], np.ones(len(shapes)))
    errors = np.abs(features @ found / seconds - 1)
    return CalibratedCost(
        model=model,
        machine=f"{platform.machine()}, one thread",
        vocab_size=vocab_size,
        page_size=page_size,
        knots=list(zip(knots, found[: len(knots)].tolist(), strict=True)),
        per=dict(zip(TERMS, found[len(knots) :].tolist(), strict=True)),
        host_seconds=host_seconds,
        fit={
            "shapes": len(shapes),
            "steps": sum(map(len, measured.values())),
            "mean_error": float(errors.mean()),
            "p90_error": float(np.percentile(errors, 90)),
            "max_error": float(errors.max()),
        },
    )


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 that minimises |a x - b| (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23)."""
    scale = np.maximum(np.linalg.norm(a, axis=0), 1e-300)
    a = a / scale
    x = np.zeros(a.shape[1])
    passive = np.zeros(a.shape[1], dtype=bool)
    for _ in range(10 * a.shape[1]):
        gradient = a.T @ (b - a @ x)
        gradient[passive] = -np.inf
        if passive.all() or gradient.max() <= 1e-9:
            break
        passive[gradient.argmax()] = True
        while True:
            trial = np.zeros_like(x)
            trial[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
            if (trial[passive] > 0).all():
                break
            falling = passive & (trial <= 0)
            step = (x[falling] / (x[falling] - trial[falling])).min()
            x += step * (trial - x)
            passive &= x > 1e-12
            x[~passive] = 0
        x = trial
    return x / scale
