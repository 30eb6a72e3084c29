"""`StepGraphs` without a GPU: "graphs" that run their Python again show what is copied, padded and sampled."""

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
from tests.mixed_reference import TiledAttention, mixed_inputs
from worker.batch import Batch
from worker.config import WorkerConfig
from worker.graphs import GraphSizes, StepGraphs
from worker.graphs.mixed import MAX_PREFILLS, MixedGraphs, MixedInputs, MixedSize, mixed_graph_sizes
from worker.parallel import TPGroup
from worker.runner import ModelRunner

torch.set_num_threads(1)
ROWS, PAGES, SIZES = 6, 60, (1, 2, 4)
MIXED = (MixedSize(10, 2), MixedSize(10, 4), MixedSize(25, 4))
TILE = 3


class Rerun:
    """Stands in for a CUDA graph: a replay calls the recorded function, so reads what the static buffers hold then."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._work()


class Reruns:
    """Stands in for the recorder."""

    def record(self, work: Callable[[], None]) -> Rerun:
        work()
        return Rerun(work)


def decode_replays(runner: ModelRunner, size: int) -> tuple[int, int, int]:
    """Replays of a decode graph, and of the greedy and the noisy sampler behind it."""
    graphs = runner._graphs
    pair = graphs._samplers._captured[size]
    return graphs._decode._captured[size].replays, pair.greedy.replays, pair.noisy.replays


def mixed_replays(runner: ModelRunner) -> list[int]:
    return [graph.replays for _, graph in sorted(runner._graphs._mixed._captured.items())]


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


def make_runner(
    path: str, monkeypatch: pytest.MonkeyPatch | None = None, mixed: tuple[MixedSize, ...] = ()
) -> ModelRunner:
    """With `monkeypatch`: a runner with (stand-in) graphs for `SIZES`, and for `mixed`."""
    config = WorkerConfig(path, page_size=4, max_running_requests=ROWS, max_step_tokens=64)
    runner = ModelRunner(config, TPGroup.single())
    runner._context.attention = TiledAttention(TILE)
    runner.load()
    runner.allocate(PAGES)
    if monkeypatch is None:
        return runner
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

    def inputs(graphs: MixedGraphs, size: MixedSize, dummy_row: int, dummy_slot: int) -> MixedInputs:
        """Instead of the kernel."""
        prefills = min(MAX_PREFILLS, size.entries)
        return mixed_inputs(graphs._buffer, graphs._token_pool.tokens, *size, prefills, TILE, dummy_row, dummy_slot)

    monkeypatch.setattr(MixedGraphs, "_inputs", inputs)
    monkeypatch.setattr(model, "compute_logits", logits_into)
    monkeypatch.setattr(step_input, "decode_batch", with_host_lengths)
    sizes = GraphSizes(SIZES, mixed)
    graphs = StepGraphs(model, step_input, runner._sampler, runner._token_pool, sizes, 64, Reruns())
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
    assert decode_replays(runner, size) == replays


def test_batches_beyond_the_largest_graph_run_eagerly(path, monkeypatch) -> None:
    runner = make_runner(path, monkeypatch)
    assert serve(runner, SETTINGS, pad=True) == serve(make_runner(path), SETTINGS, pad=False)
    assert all(decode_replays(runner, size) == (0, 0, 0) for size in SIZES)


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
    assert decode_replays(runner, size) == replays


def serve_mixed(runner: ModelRunner, budget: int, given: dict, more: int = 12) -> list[list[int]]:
    """Tokens of requests that arrive one a step, some with a prefix in common, in steps of `budget` tokens."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=PAGES, page_size=4, max_running_requests=ROWS, max_seq_len=64, max_step_tokens=budget,
            pad_sizes=SIZES,
        )
    )  # fmt: skip
    tokens: list[list[int]] = [[] for _ in range(more)]
    rng = np.random.default_rng(2)
    shared = rng.integers(3, 80, 9)
    waiting = [np.concatenate((shared[: 9 * (i % 2)], rng.integers(3, 80, 1 + 5 * (i % 5)))) for i in range(more)]
    while scheduler.has_work or waiting:
        if waiting:
            number = more - len(waiting)
            params = SamplingParams(seed=number, max_tokens=2 + number % 7, ignore_eos=True, **given)
            scheduler.add(Request(number, waiting.pop(0), params))
        outputs = scheduler.process(runner.launch(scheduler.schedule()).result())
        scheduler.check_integrity()
        for request, token in zip(outputs.request_ids.tolist(), outputs.tokens.tolist(), strict=True):
            tokens[request].append(token)
    return tokens


@pytest.mark.parametrize("budget", [7, 25, 60])
@pytest.mark.parametrize(
    "given", [{"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.8, "top_p": 0.8, "frequency_penalty": 0.5}]
)
def test_mixed_steps_give_the_eager_tokens(path, monkeypatch, budget: int, given: dict) -> None:
    """Chunks of prompts beside decodes, twins of a prefix, steps without a sample; what does not fit runs eagerly."""
    runner = make_runner(path, monkeypatch, MIXED)
    tokens = serve_mixed(runner, budget, given)
    assert tokens == serve_mixed(make_runner(path), budget, given)
    assert sum(mixed_replays(runner)) > 5 and mixed_replays(runner)[1]
    assert bool(mixed_replays(runner)[2]) == (budget > 10)


def test_scored_prompts_run_eagerly(path, monkeypatch) -> None:
    runner = make_runner(path, monkeypatch, MIXED)
    settings = [{"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 1}]
    assert serve_extras(runner, settings)[0] == serve_extras(make_runner(path), settings)[0]
    assert not any(mixed_replays(runner))


@pytest.mark.parametrize("decodes", [(1,), (1, 2, 4, 7), (1, 2, 4, 8, 16, 24, 32, 40), (*range(8, 257, 8),)])
@pytest.mark.parametrize("budget", [1, 7, 100, 2048, 16384])
@pytest.mark.parametrize("parameters", [10**5, 218_000_000, 10**9, 10**12])
def test_mixed_sizes(decodes: tuple[int, ...], budget: int, parameters: int) -> None:
    sizes = mixed_graph_sizes(decodes, budget, parameters)
    assert list(sizes) == sorted(set(sizes)) and len(sizes) <= 30
    assert all(size.entries in decodes and size.entries <= size.tokens <= min(budget, 4096) for size in sizes)
    if sizes and budget >= decodes[-1]:
        assert sizes[-1].entries == max(size for size in decodes if size <= sizes[-1].tokens)
