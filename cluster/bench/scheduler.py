"""What the scheduler costs the driver: process CPU time of `schedule()` + `process()`, no model and no Ray.

A `FakeWorker` answers each plan between the two timed calls, so a plan that a worker would refuse stops the benchmark.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.fake_worker import FakeWorker
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.step import StepResult

PROMPT_TOKENS = 512
PREFILL_BUDGET = 1 << 16
DEFAULT_RUNNING = (64, 256, 1024, 4096)


def run_scheduler_bench(
    running: Sequence[int] = DEFAULT_RUNNING, page_size: int = 16, measured_pages: int = 8, repeats: int = 5
) -> dict[str, list[dict[str, float]]]:
    """Measure decode steps and planning; all times in microseconds of process CPU time.

    Args:
        running: batch sizes of the decode table.
        page_size: tokens per KV page.
        measured_pages: a decode row grows by this many pages while it is measured (at least 4).
        repeats: planning costs are the median of this many fresh schedulers.

    Returns:
        {"decode": [{"running", "page_size", "steps", "mean_us", "median_us", "p99_us", "max_us", "all_cross_us"}],
        "planning": [{"op", "requests", "tokens", "budget", "steps", "plan_us", "process_us"}]}.
        Row lengths are staggered over the page, so 1 / page_size of the rows start a page in each step;
        `all_cross_us` is the median step in which every row does. `plan_us` covers arrival and all `schedule()` calls.
    """
    steps = max(4, measured_pages) * page_size
    decode = []
    for count in running:
        times = _decode_times(count, page_size, steps, staggered=True)
        aligned = _decode_times(count, page_size, steps, staggered=False)
        # All rows have equal lengths: the steps that cross are page_size apart, and by far the dearest.
        crossing = np.median(np.sort(aligned)[-(steps // page_size) :]) if page_size > 1 else np.median(aligned)
        decode.append(
            {
                "running": count,
                "page_size": page_size,
                "steps": steps,
                "mean_us": float(times.mean()),
                "median_us": float(np.median(times)),
                "p99_us": float(np.percentile(times, 99)),
                "max_us": float(times.max()),
                "all_cross_us": float(crossing),
            }
        )
    planning = [
        _planning("prefill", 1, 8192, 8192, page_size, repeats),
        _planning("prefill", 1, 8192, 512, page_size, repeats),
        _planning("arrivals", 1000, 512, 1000 * 512, page_size, repeats),
    ]
    return {"decode": decode, "planning": planning}


class _Timer:
    """A scheduler and its worker; adds up the scheduler's share."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.scheduler = Scheduler(config)
        self.worker = FakeWorker(config, full_check=False)
        self.results: list[StepResult] = []

    def schedule(self) -> int | None:
        """Nanoseconds to plan one step, None when there is none to plan. The worker runs afterwards."""
        start = time.process_time_ns()
        plan = self.scheduler.schedule()
        spent = time.process_time_ns() - start
        if plan is None:
            return None
        self.results.append(self.worker.execute(plan))
        return spent

    def process(self) -> int:
        """Nanoseconds to apply the oldest result."""
        result = self.results.pop(0)
        start = time.process_time_ns()
        self.scheduler.process(result)
        return time.process_time_ns() - start


def _requests(count: int, tokens: Sequence[int], max_tokens: int) -> list[Request]:
    rng = np.random.default_rng(0)
    sampling = SamplingParams(temperature=0.6, seed=0, max_tokens=max_tokens, ignore_eos=True)
    return [Request(i, rng.integers(1, 30000, tokens[i], dtype=np.int32), sampling) for i in range(count)]


def _config(rows: int, tokens_per_row: int, page_size: int, budget: int) -> SchedulerConfig:
    pages = -(-tokens_per_row // page_size) + 1
    return SchedulerConfig(
        num_pages=rows * pages, page_size=page_size, max_running_requests=rows, max_seq_len=pages * page_size,
        max_step_tokens=budget,
    )  # fmt: skip


def _decode_times(running: int, page_size: int, steps: int, *, staggered: bool) -> np.ndarray:
    """float64[steps], microseconds of each steady decode step of `running` rows at overlap depth 2."""
    lengths = [PROMPT_TOKENS + (i % page_size if staggered else 0) for i in range(running)]
    # The first rows decode while the last are prefilled, and a few steps warm up.
    prefill_steps = -(-sum(lengths) // PREFILL_BUDGET) + running * PROMPT_TOKENS // PREFILL_BUDGET
    max_tokens = prefill_steps + steps + 16
    config = _config(running, max(lengths) + max_tokens, page_size, PREFILL_BUDGET)
    timer = _Timer(config)
    for request in _requests(running, lengths, max_tokens):
        timer.scheduler.add(request)
    while timer.worker.prefilled_tokens < sum(lengths):
        timer.schedule()
        if len(timer.results) == config.overlap_depth:
            timer.process()
    spent = np.empty(steps + 4)
    for i in range(len(spent)):
        while len(timer.results) >= config.overlap_depth:
            timer.process()
        planning = timer.schedule()
        if planning is None:
            raise RuntimeError(f"no decode step to plan: {timer.scheduler.stats()}")
        spent[i] = planning + (timer.process() if len(timer.results) == config.overlap_depth else 0)
    return spent[4:] / 1e3


def _planning(op: str, requests: int, tokens: int, budget: int, page_size: int, repeats: int) -> dict[str, float]:
    """Plan `requests` prompts of `tokens` tokens from arrival to the last chunk, on fresh schedulers."""
    planning, processing = [], []
    steps = 0
    for _ in range(repeats):
        timer = _Timer(_config(requests, tokens + 2, page_size, budget))
        arrivals = _requests(requests, [tokens] * requests, 1)
        start = time.process_time_ns()
        for request in arrivals:
            timer.scheduler.add(request)
        planned, processed, steps = time.process_time_ns() - start, 0, 0
        while (spent := timer.schedule()) is not None:
            planned += spent
            processed += timer.process()
            steps += 1
        planning.append(planned / 1e3)
        processing.append(processed / 1e3)
    return {
        "op": op, "requests": requests, "tokens": tokens, "budget": budget, "steps": steps,
        "plan_us": float(np.median(planning)), "process_us": float(np.median(processing)),
    }  # fmt: skip
