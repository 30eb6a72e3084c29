"""A model of Qwen3-0.6B's shape with random weights: every attention backend in bfloat16 against float32 in plain
torch, and greedy tokens in float32 against transformers."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch

from scheduler.config import SchedulerConfig
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.checkpoints import load_reference, make_checkpoint
from tests.gpu.test_runner import LENGTHS, generate
from tests.references import GreedyJudge

pytest.importorskip("triton", reason="triton is not installed")

from worker.attention import flash_backend
from worker.config import WorkerConfig
from worker.kernels.flash_prefill import why_not
from worker.parallel import TPGroup
from worker.runner import ModelRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SHAPE = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
PROMPTS = (700, 40, 1100, 16, 333, 1, 129, 512)
BUDGET = 512
TIE = 5e-4  # sums of 28 layers in another order: logits of size 10 differ by about 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("shape"), dtype=torch.bfloat16, **SHAPE)


class Rank:
    """A rank that keeps the hidden states of its last step."""

    def __init__(self, path: Path, backend: str, dtype: str, page_size: int, num_pages: int, layout: str) -> None:
        self.runner = ModelRunner(
            WorkerConfig(
                str(path), device="cuda", page_size=page_size, max_running_requests=8, max_seq_len=2048,
                max_step_tokens=BUDGET, dtype=dtype, attention_backend=backend, kv_layout=layout, use_graphs=False,
            ),
            TPGroup.single(),
        )  # fmt: skip
        self.runner.load()
        self.runner.allocate(num_pages)
        self.runner.warm_up()
        self.tokens = self.runner._token_pool.tokens
        self.runner._model.register_forward_hook(self._keep)

    def _keep(self, _model: object, _arguments: object, hidden: torch.Tensor) -> None:
        self.hidden = hidden.float()


@pytest.mark.parametrize(("page_size", "layout"), [(1, "layer_first"), (16, "page_first"), (128, "layer_first")])
def test_bfloat16_backends_against_float32(checkpoint, page_size, layout, monkeypatch) -> None:
    """None may be much further from float32 than plain torch in bfloat16 is, in any step."""
    monkeypatch.setattr(flash_backend, "MIN_FLOPS", 0.0)  # every prefill through FlashAttention
    torch.backends.cuda.matmul.allow_tf32 = False
    num_pages = 8192 // page_size
    place = (page_size, num_pages, layout)
    exact = Rank(checkpoint, "torch", "float32", *place)
    names = ["torch", "triton"] + ["flash"] * (why_not(torch.bfloat16, torch.device("cuda")) is None)
    ranks = {name: Rank(checkpoint, name, "bfloat16", *place) for name in names}
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=num_pages, page_size=page_size, max_running_requests=8, max_seq_len=2048, max_step_tokens=BUDGET,
            overlap_depth=1,
        )
    )  # fmt: skip
    rng = np.random.default_rng(3)
    for number, length in enumerate(PROMPTS):
        prompt = rng.integers(3, SHAPE["vocab_size"], length).astype(np.int32)
        scheduler.add(Request(number, prompt, SamplingParams(temperature=0.0, max_tokens=20, seed=number)))
    pending, steps, mixed = deque(), 0, 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        steps += 1
        mixed += 0 < plan.num_decode < plan.num_rows
        pending.append(exact.runner.launch(plan))
        for rank in ranks.values():
            rank.runner.launch(plan)
        torch.cuda.synchronize()
        errors = {
            name: float((rank.hidden - exact.hidden).norm() / exact.hidden.norm()) for name, rank in ranks.items()
        }
        assert max(errors.values()) < 1.5 * errors["torch"] < 0.15, (steps, errors)
        for rank in ranks.values():
            rank.tokens.copy_(exact.tokens)  # all go on with the same tokens
        scheduler.process(pending.popleft().result())
        scheduler.take_outputs()
    assert mixed > 3
    print(f"{steps} steps, last errors {errors}")


@pytest.mark.parametrize(
    "setting",
    [
        {"page_size": 16, "attention_backend": "triton"},
        {"page_size": 1, "attention_backend": "triton", "kv_layout": "page_first"},
        {"page_size": 128, "attention_backend": "triton", "use_graphs": False},
        {"page_size": 16, "attention_backend": "torch", "use_graphs": False},
    ],
    ids=str,
)
def test_greedy_tokens_equal_transformers(checkpoint, setting) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    rng = np.random.default_rng(4)
    prompts = [rng.integers(3, SHAPE["vocab_size"], length).tolist() for length in LENGTHS]
    tokens = generate(checkpoint, prompts, budget=64, dtype="float32", num_pages=128, **setting)
    judge = GreedyJudge(load_reference(checkpoint).to("cuda"), TIE)
    for prompt, output in zip(prompts, tokens, strict=True):
        judge.check(prompt, output)
    print(f"{judge.outputs} outputs, {judge.with_ties} with ties")
