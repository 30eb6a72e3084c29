"""The Triton backend against the torch backend, layer by layer, over a long random run of mixed steps in float32."""

from collections import deque

import numpy as np
import pytest
import torch

from scheduler.config import SchedulerConfig
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.checkpoints import make_checkpoint
from worker.config import WorkerConfig
from worker.parallel import TPGroup
from worker.runner import ModelRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
STEPS, ROWS, PAGES, BUDGET = 1000, 16, 40, 96


class Recorded:
    """A rank that keeps what every layer of its last step gave: residual + what is still to be added."""

    def __init__(self, path, backend):
        self.runner = ModelRunner(
            WorkerConfig(
                str(path), device="cuda", page_size=16, max_running_requests=ROWS, max_seq_len=256,
                max_step_tokens=BUDGET, dtype="float32", attention_backend=backend, use_graphs=False,
            ),
            TPGroup.single(),
        )  # fmt: skip
        self.runner.load()
        self.runner.allocate(PAGES)
        self.layers = []
        for layer in self.runner._model.model.layers:
            layer.register_forward_hook(self._keep)

    def _keep(self, _layer, _arguments, output):
        residual, delta = output
        self.layers.append(residual + delta)

    def launch(self, plan):
        self.layers.clear()
        return self.runner.launch(plan)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_layer_of_a_thousand_mixed_steps(family, tmp_path):
    torch.backends.cuda.matmul.allow_tf32 = False
    path = make_checkpoint(family, tmp_path)
    ours, reference = Recorded(path, "triton"), Recorded(path, "torch")
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=PAGES, page_size=16, max_running_requests=ROWS, max_seq_len=256, max_step_tokens=BUDGET,
            overlap_depth=2,
        )
    )  # fmt: skip
    rng = np.random.default_rng(7)
    shared = rng.integers(3, 100, 64).astype(np.int32)
    pending, added, steps, mixed = deque(), 0, 0, 0
    while steps < STEPS:
        if rng.random() < 0.3:
            own = rng.integers(3, 100, int(rng.integers(1, 120))).astype(np.int32)
            prompt = np.concatenate((shared[: int(rng.integers(0, 65))], own))
            params = SamplingParams(temperature=0.0, max_tokens=int(rng.integers(1, 40)), seed=added, ignore_eos=True)
            scheduler.add(Request(added, prompt, params))
            added += 1
        if added and rng.random() < 0.05:
            scheduler.abort(int(rng.integers(0, added)))
        plan = scheduler.schedule()
        if plan is not None:
            steps += 1
            mixed += 0 < plan.num_decode < plan.num_rows
            pending.append(ours.launch(plan))
            reference.launch(plan)
            torch.cuda.synchronize()  # the two runners have streams of their own
            for ours_layer, its_layer in zip(ours.layers, reference.layers, strict=True):
                torch.testing.assert_close(ours_layer, its_layer, rtol=1e-3, atol=1e-4)
        if pending and (plan is None or len(pending) == 2):
            scheduler.process(pending.popleft().result())
            scheduler.take_outputs()
            scheduler.check_integrity()
    assert mixed > STEPS // 10
