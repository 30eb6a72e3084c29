"""`DecodeGraphs` without a GPU: "graphs" that run their Python again show what is copied, padded and sampled."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hand_driver import HandDriver
from transformers import LlamaConfig, LlamaForCausalLM

from scheduler.config import SchedulerConfig
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.step import StepPlan
from worker.batch import Batch
from worker.config import WorkerConfig
from worker.graphs import DecodeGraphs
from worker.parallel import TPGroup
from worker.runner import ModelRunner

torch.set_num_threads(1)
ROWS, PAGES, SIZES = 6, 60, (1, 2, 4)


class Rerun:
    """Stands in for a CUDA graph: a replay calls the recorded function, so reads what the static buffers hold then."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._work()


class RerunGraphs(DecodeGraphs):
    def _record(self, work: Callable[[], None]) -> Rerun:
        work()
        return Rerun(work)

    def replays(self, size: int) -> tuple[int, int, int]:
        captured = self._captured[size]
        return captured.forward.replays, captured.greedy.replays, captured.noisy.replays


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=83, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def make_runner(path: str, monkeypatch: pytest.MonkeyPatch | None = None) -> ModelRunner:
    """With `monkeypatch`: a runner with (stand-in) graphs for `SIZES`."""
    config = WorkerConfig(path, page_size=4, max_running_requests=ROWS, max_step_tokens=64)
    runner = ModelRunner(config, TPGroup.single())
    runner.load()
    runner.allocate(PAGES)
    if monkeypatch is None:
        return runner
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    model, step_input = runner._model, runner._input
    compute_logits, decode_batch = model.compute_logits, step_input.decode_batch

    def logits_into(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return compute_logits(hidden) if out is None else out.copy_(compute_logits(hidden))

    def with_host_lengths(*args: object) -> Batch:
        """What the CPU's attention backend needs and a graph does not have."""
        batch = decode_batch(*args)
        batch.host_rows, batch.host_cached_len = batch.rows.numpy(), batch.cached_len.numpy()
        batch.host_device_len = batch.device_len.numpy()
        return batch

    monkeypatch.setattr(model, "compute_logits", logits_into)
    monkeypatch.setattr(step_input, "decode_batch", with_host_lengths)
    graphs = RerunGraphs(model, step_input, runner._sampler, runner._token_pool, runner._device, SIZES, 64)
    phases = []
    with torch.inference_mode():
        graphs.capture(runner._page_table.dummy_row, runner._page_table.dummy_slot, lambda *p: phases.append(p))
    assert phases[0][1] == 0.0 and phases[-1][1] == 1.0
    assert not runner._pool.k_cache(0)[:-1].any()
    runner._graphs = graphs
    return runner


SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.1, "seed": 4, "top_p": 0.8},
    {"temperature": 0.0, "suppress": (16, list(range(40)))},
    {"temperature": 0.7, "seed": 5, "top_k": 9},
]


def serve(runner: ModelRunner, settings: list[dict], pad: bool) -> list[list[int]]:
    """Prefill a row of each, then nine decode steps of all, padded to the next captured size."""
    driver = HandDriver(ROWS, PAGES, 4)
    rows = [driver.request(i, list(range(3 + i, 12)), **s) for i, s in enumerate(settings)]

    def launch(plan: StepPlan) -> None:
        driver.process(runner.launch(plan).result())

    launch(driver.plan([(row, row.prompt_len) for row in rows]))
    padded = min((size for size in SIZES if size >= len(rows)), default=None) if pad else None
    for _ in range(9):
        launch(driver.plan([(row, 1) for row in rows], padded))
    return [row.tokens for row in rows]


@pytest.mark.parametrize(
    ("chosen", "size", "replays"),
    [
        ([0], 1, (9, 9, 0)),
        ([0, 1, 0], 4, (9, 0, 9)),
        ([0, 1, 2], 4, (9, 0, 0)),  # filters: sampled eagerly from the graph's logits
        ([4, 4], 2, (9, 0, 0)),
        ([0, 3], 2, (9, 2, 0)),  # row 1 samples positions 9 to 17 here: plain from 16 on
    ],
)
def test_replayed_steps_give_the_eager_tokens(path, monkeypatch, chosen, size: int, replays) -> None:
    settings = [SETTINGS[i] for i in chosen]
    runner = make_runner(path, monkeypatch)
    tokens = serve(runner, settings, pad=True)
    assert tokens == serve(make_runner(path), settings, pad=False)
    assert runner._graphs.replays(size) == replays


def test_batches_beyond_the_largest_graph_run_eagerly(path, monkeypatch) -> None:
    runner = make_runner(path, monkeypatch)
    assert serve(runner, SETTINGS, pad=True) == serve(make_runner(path), SETTINGS, pad=False)
    assert all(runner._graphs.replays(size) == (0, 0, 0) for size in SIZES)


EXTRAS = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "logprobs": 0},
    {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logit_bias": {4: 8.0}, "logprobs": 1},
]


def serve_extras(runner: ModelRunner, settings: list[dict]) -> tuple[list[list[int]], list[float]]:
    """Ten tokens for each of these parameters: tokens, and all log probabilities in order."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=PAGES, page_size=4, max_running_requests=ROWS, max_seq_len=64, max_step_tokens=64, pad_sizes=SIZES
        )
    )
    tokens: list[list[int]] = [[] for _ in settings]
    logprobs: list[float] = []
    for i, given in enumerate(settings):
        params = SamplingParams(seed=i, max_tokens=10, **given)
        scheduler.add(Request(i, np.arange(3 + i, 12), params))
    while scheduler.has_work:
        outputs = scheduler.process(runner.launch(scheduler.schedule()).result())
        for request, token in zip(outputs.request_ids.tolist(), outputs.tokens.tolist(), strict=True):
            tokens[request].append(token)
        if outputs.logprobs is not None:
            logprobs += outputs.logprobs.block.logprobs.tolist()
    return tokens, logprobs


@pytest.mark.parametrize(
    ("chosen", "size", "replays"),
    [
        ([0], 1, (9, 9, 0)),  # log probabilities beside the captured sampler
        ([0, 1, 0], 4, (9, 0, 9)),
        ([2, 0], 2, (9, 0, 0)),
        ([3, 2, 1], 4, (9, 0, 0)),
    ],
)
def test_extras_on_the_logits_of_a_graph(path, monkeypatch, chosen, size: int, replays) -> None:
    settings = [EXTRAS[i] for i in chosen]
    runner = make_runner(path, monkeypatch)
    tokens, logprobs = serve_extras(runner, settings)
    eager_tokens, eager_logprobs = serve_extras(make_runner(path), settings)
    assert tokens == eager_tokens and logprobs == pytest.approx(eager_logprobs, abs=1e-5)
    assert len(logprobs) == 10 * sum("logprobs" in given for given in settings)
    assert runner._graphs.replays(size) == replays
