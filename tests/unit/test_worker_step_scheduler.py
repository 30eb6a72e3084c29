"""The real scheduler drives the real runner: every request gets transformers' greedy tokens, whatever the memory."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scheduler.config import SchedulerConfig
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.step import StepPlan
from worker.config import WorkerConfig
from worker.parallel import TPGroup
from worker.runner import ModelRunner

torch.set_num_threads(1)
MAX_SEQ_LEN, ROWS = 64, 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, LlamaForCausalLM]:
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=MAX_SEQ_LEN, initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tiny")
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(path)
    return str(path), model


def serve(path: str, requests: list[Request], **settings: object) -> tuple[dict[int, list[int]], Scheduler]:
    """Run all requests to their end with up to `overlap_depth` steps in flight; tokens by request id."""
    config = SchedulerConfig(max_running_requests=ROWS, max_seq_len=MAX_SEQ_LEN, **settings)
    scheduler = Scheduler(config)
    runner = ModelRunner(
        WorkerConfig(
            path, page_size=config.page_size, max_running_requests=ROWS, max_step_tokens=config.max_step_tokens
        ),
        TPGroup.single(),
    )
    runner.load()
    runner.allocate(config.num_pages)
    for request in requests:
        scheduler.add(request)
    tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
    pending: deque = deque()
    while scheduler.has_work:
        plan = scheduler.schedule()
        if plan is not None:
            pending.append(runner.launch(StepPlan.decode(plan.buffer.tobytes())))
            scheduler.check_integrity()
            if len(pending) < config.overlap_depth:
                continue
        assert pending, "the scheduler has work, plans nothing, and waits for nothing"
        outputs = scheduler.process(pending.popleft().result())
        assert not outputs.errors
        for request_id, token in zip(outputs.request_ids.tolist(), outputs.tokens.tolist(), strict=True):
            if token >= 0:
                tokens[request_id].append(token)
    return tokens, scheduler


def make_requests(sampled: bool = False) -> list[Request]:
    """Eight requests over four rows; half share a prefix of 11 tokens, two are twins."""
    rng = np.random.default_rng(2)
    shared = rng.integers(0, 97, 11).tolist()
    requests = []
    for index, length in enumerate([1, 5, 30, 12, 9, 3, 22, 9]):
        own = np.random.default_rng(min(index, 6)).integers(0, 97, length).tolist()
        params = SamplingParams(
            temperature=0.8 if sampled else 0.0, top_p=0.9 if index % 2 else 1.0, top_k=40 if index % 3 else 0,
            max_tokens=8 + index, seed=100 + index, ignore_eos=True,
        )  # fmt: skip
        requests.append(Request(index, np.array((shared if index % 2 == 0 else []) + own), params))
    return requests


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 1, "num_pages": 400, "max_step_tokens": 512, "overlap_depth": 2},
        {"page_size": 4, "num_pages": 100, "max_step_tokens": 64, "overlap_depth": 1},
        {"page_size": 4, "num_pages": 20, "max_step_tokens": 7, "overlap_depth": 2},  # preempts
        {"page_size": 16, "num_pages": 16, "max_step_tokens": 64, "overlap_depth": 2, "pad_sizes": (1, 2, 4)},
        {"page_size": 4, "num_pages": 100, "max_step_tokens": 7, "overlap_depth": 2, "cache_type": "naive"},
    ],
    ids=str,
)
def test_greedy_tokens_equal_transformers(checkpoint, settings: dict) -> None:
    path, model = checkpoint
    requests = make_requests()
    tokens, scheduler = serve(path, requests, **settings)
    for request in requests:
        ids = torch.tensor(request.prompt_ids[None], dtype=torch.int64)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.sampling.max_tokens, do_sample=False,
                pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        assert tokens[request.request_id] == out[0, ids.shape[1] :].tolist()
    if settings["num_pages"] == 20:
        assert scheduler.stats().preemptions > 0


def test_sampled_tokens_do_not_depend_on_how_steps_are_made(checkpoint) -> None:
    path, _ = checkpoint
    wide = serve(path, make_requests(True), page_size=16, num_pages=40, max_step_tokens=512, overlap_depth=2)[0]
    tight = serve(path, make_requests(True), page_size=4, num_pages=20, max_step_tokens=7, overlap_depth=1)[0]
    assert wide == tight
