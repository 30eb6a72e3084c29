"""The CPU engine in this process: the same scheduler, the model itself instead of the cost model.

Two clocks. `wall`: arrivals come in real time, a worker thread runs the steps, as in the engine's processes.
`cpu`: virtual time that goes on by the CPU time each step took, so that what else runs on the machine does not count.
Both run the model on one thread, as a rank on a CPU does.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import numpy as np
import torch

from cluster.errors import ConfigError, ModelLoadError
from cluster.progress import Progress, no_progress
from cluster.simulate.metrics import Recorder, RunResult, Totals
from cluster.simulate.tokens import prompt_tokens
from cluster.simulate.traces import Trace
from scheduler.config import SchedulerConfig
from scheduler.request import InvalidRequest, Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.step import StepPlan, StepResult
from worker.config import WorkerConfig
from worker.errors import ModelError
from worker.parallel import TPGroup
from worker.runner import ModelRunner

CLOCKS = ("cpu", "wall")


def load_runner(path: Path, config: SchedulerConfig, progress: Progress = no_progress) -> ModelRunner:
    """The model of `path` on one CPU thread, with a pool of `config.num_pages`.

    Raises:
        ModelLoadError: the checkpoint cannot be loaded or the pool does not fit.
    """
    torch.set_num_threads(1)
    worker_config = WorkerConfig(
        model_path=str(path), device="cpu", page_size=config.page_size, num_pages=config.num_pages,
        max_running_requests=config.max_running_requests, max_seq_len=config.max_seq_len,
        max_step_tokens=config.max_step_tokens,
    )  # fmt: skip
    try:
        runner = ModelRunner(worker_config, TPGroup.single(), progress)
        runner.load()
        runner.allocate(runner.max_pages())
        runner.warm_up()
    except ModelError as error:
        raise ModelLoadError(str(error)) from error
    _run_once(runner, config)
    return runner


def _run_once(runner: ModelRunner, config: SchedulerConfig) -> None:
    """A largest prefill and a few decodes: what is paid once (scratch memory, kernels) is paid before measuring."""
    scheduler = Scheduler(config)
    sampling = SamplingParams(max_tokens=4, seed=0, ignore_eos=True)
    scheduler.add(Request(0, np.zeros(min(config.max_step_tokens, config.max_seq_len - 4), dtype=np.int32), sampling))
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.process(runner.launch(plan).result())


class MeasuredWorker:
    """A `TimedWorker` that runs the model and reports the CPU time of each step."""

    host_seconds = 0.0

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute(self, plan: StepPlan) -> tuple[StepResult, float]:
        started = time.thread_time()
        result = self._runner.launch(plan).result()
        return result, time.thread_time() - started


def check_single_turn(trace: Trace) -> None:
    """A model does not say what the trace says, so later turns would not go on from its answers."""
    if any(request.after is not None for request in trace.requests):
        raise ConfigError(
            "a real run takes single requests: the answers in a trace of conversations are not the model's"
        )


def run_in_real_time(
    label: str, trace: Trace, config: SchedulerConfig, runner: ModelRunner, vocab_size: int
) -> RunResult:
    """Serve the trace on the wall clock."""
    scheduler, recorder = Scheduler(config), Recorder(len(trace.requests))
    pending = deque(sorted((request.arrival, number) for number, request in enumerate(trace.requests)))
    requests = []
    for number, wanted in enumerate(trace.requests):
        sampling = SamplingParams(max_tokens=wanted.output_len, seed=wanted.output_key, ignore_eos=True)
        requests.append(Request(number, prompt_tokens(wanted.prompt, vocab_size), sampling))
        try:
            scheduler.validate(requests[-1])
        except InvalidRequest as error:
            raise ConfigError(f"request {number} of the trace cannot be served: {error}") from error
    in_flight: deque[Future[StepResult]] = deque()
    series: list[tuple[float, ...]] = []
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as worker:
        begin = time.perf_counter()
        while pending or scheduler.has_work:
            now = time.perf_counter() - begin
            while pending and pending[0][0] <= now:
                when, number = pending.popleft()
                recorder.arrival[number] = when
                scheduler.add(requests[number])
            while (plan := scheduler.schedule()) is not None:
                in_flight.append(worker.submit(lambda plan=plan: runner.launch(plan).result()))
            wait = pending[0][0] - (time.perf_counter() - begin) if pending else None
            if in_flight:
                try:
                    result = in_flight[0].result(None if wait is None else max(wait, 0.0))
                except FutureTimeout:
                    continue
                in_flight.popleft()
                recorder.record(time.perf_counter() - begin, scheduler.process(result))
                stats = scheduler.stats()
                series.append(
                    (
                        time.perf_counter() - begin,
                        stats.waiting,
                        stats.running,
                        stats.cached_tokens,
                        stats.prefilled_tokens,
                    )
                )
            elif wait is not None and wait > 0:
                time.sleep(wait)
            recorder.record(time.perf_counter() - begin, scheduler.take_outputs())
        elapsed = time.perf_counter() - begin
    stats = scheduler.stats()
    totals = Totals(stats.prefilled_tokens, stats.cached_tokens, stats.preemptions, stats.steps)
    return RunResult(label, recorder, totals, np.array(series).reshape(-1, 5), 0, 1, elapsed)
