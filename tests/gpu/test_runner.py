"""The whole rank on a GPU (scheduler, runner, graphs, kernels), token for token against transformers in float32."""

from collections import deque
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch

from scheduler.config import SchedulerConfig
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.checkpoints import FAMILIES, make_checkpoint
from worker.config import WorkerConfig
from worker.parallel import TPGroup
from worker.runner import ModelRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
LENGTHS = (3, 40, 17, 90, 16, 64, 1, 33)
NEW_TOKENS = 24


@contextmanager
def no_waiting():
    """Nothing in here may wait for the device. (The reference backend plans on the host, and does.)"""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def generate(path, prompts, *, page_size, budget, depth=2, sampling=(), num_pages=64, **config):
    """Tokens of each prompt from a fresh runner."""
    runner = ModelRunner(
        WorkerConfig(
            str(path), device="cuda", page_size=page_size, max_running_requests=8, max_seq_len=256,
            max_step_tokens=budget, **config,
        ),
        TPGroup.single(),
    )  # fmt: skip
    runner.load()
    num_pages = num_pages * 16 // page_size
    assert runner.max_pages() > num_pages // 8
    runner.allocate(num_pages)
    sizes = runner.warm_up()
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=num_pages, page_size=page_size, max_running_requests=8, max_seq_len=256, max_step_tokens=budget,
            overlap_depth=depth, pad_sizes=sizes,
        )
    )  # fmt: skip
    for i, prompt in enumerate(prompts):
        params = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "seed": i} | dict(sampling)
        scheduler.add(Request(i, np.array(prompt, dtype=np.int32), SamplingParams(**params)))
    tokens, pending = [[] for _ in prompts], deque()
    while scheduler.has_work:
        plan = scheduler.schedule()
        if plan is not None:
            with nullcontext() if config.get("attention_backend") == "torch" else no_waiting():
                pending.append(runner.launch(plan))
        if plan is None or len(pending) == depth:
            outputs = scheduler.process(pending.popleft().result())
            scheduler.check_integrity()
            for request, token in zip(outputs.request_ids.tolist(), outputs.tokens.tolist(), strict=True):
                tokens[request] += [token] if token >= 0 else []
    return tokens


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(checkpoint):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, 100, n).tolist() for n in LENGTHS]
    outputs = []
    for prompt in prompts:
        result = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        outputs.append(result[0, len(prompt) :].tolist())
    return prompts, outputs


@pytest.mark.parametrize(
    "setting",
    [
        {"page_size": 16, "budget": 64},
        {"page_size": 16, "budget": 64, "use_graphs": False},
        {"page_size": 1, "budget": 7, "kv_layout": "page_first"},
        {"page_size": 128, "budget": 512, "depth": 1},
        {"page_size": 16, "budget": 64, "attention_backend": "torch", "use_graphs": False},
    ],
    ids=str,
)
def test_greedy_tokens_equal_transformers(checkpoint, expected, setting):
    prompts, outputs = expected
    assert generate(checkpoint, prompts, dtype="float32", **setting) == outputs


EXTRAS = {
    "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {5: 2.0}, "logprobs": 3, "prompt_logprobs": 2,
}  # fmt: skip


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9, "top_k": 40}, {"min_p": 0.1}, EXTRAS], ids=str)
def test_sampled_tokens_do_not_depend_on_graphs_or_batch(checkpoint, expected, sampling):
    prompts, _ = expected
    common = {"page_size": 16, "budget": 64, "dtype": "float32"}
    sampled = {"temperature": 0.8, **sampling}
    together = generate(checkpoint, prompts, sampling=sampled, **common)
    eager = generate(checkpoint, prompts, sampling=sampled, use_graphs=False, depth=1, **common)
    assert together == eager
    alone = generate(checkpoint, prompts[:1], sampling=sampled, **common)
    assert alone[0] == together[0]
