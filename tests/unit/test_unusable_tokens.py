"""Scores that allow no token (NaN, infinite): the request whose they are ends with an error, nobody else's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from cluster import LLM, SamplingParams
from scheduler.fake_worker import FakeWorker
from scheduler.outputs import FinishReason
from scheduler.step import StepPlan
from tests.checkpoints import make_checkpoint
from tests.unit.scheduler_harness import Harness, make_config, make_request, run_alone


class NoTokenAt(FakeWorker):
    """Has no token for position `position` of row 1."""

    position = 0

    def _draw(self, plan: StepPlan, rows: np.ndarray, positions: np.ndarray, contents: np.ndarray) -> np.ndarray:
        tokens = super()._draw(plan, rows, positions, contents)
        tokens[(rows == 1) & (positions == self.position)] = -1
        return tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("position", [6, 7, 12, 15])  # the first, the last, and where pages begin and end
def test_the_request_ends_with_an_error_and_its_neighbours_go_on(depth: int, position: int) -> None:
    harness = Harness(make_config(overlap_depth=depth))
    harness.worker = NoTokenAt(harness.config, harness.model)
    harness.worker.position = position
    harness.add(
        make_request(1, [1, 2, 3], max_tokens=10, logprobs=1),
        make_request(2, [9, 8, 7, 6, 5, 4], max_tokens=10, logprobs=1),
        make_request(3, [9, 8, 7, 6, 5], max_tokens=10),
    )
    harness.drain()
    bad = harness.streams[2]
    assert bad.finish == FinishReason.ERROR and "scores for the next token are NaN or infinite" in bad.error
    expected, _ = run_alone(bad.request, harness.model, harness.config)
    assert bad.tokens == expected[: position - 6] and len(bad.logprobs) == len(bad.tokens)
    for number in (1, 3):
        stream = harness.streams[number]
        assert (stream.tokens, stream.finish) == run_alone(stream.request, harness.model, harness.config)
    stats = harness.scheduler.stats()
    assert (stats.running, stats.free_pages + stats.cached_pages) == (0, stats.total_pages)


def test_weights_with_a_nan_end_the_requests_that_meet_it(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    file = path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["model.embed_tokens.weight"][60, 3] = torch.nan
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    sizes = {"num_pages": 64, "max_running_requests": 4, "max_step_tokens": 16, "executor": "inproc", "device": "cpu"}
    with LLM(str(path), page_size=4, **sizes) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
        good, bad, alone = (
            llm.generate(prompts, sampling) for prompts in ([[3, 4], [3, 60, 4]], [[60]], [[3, 4]])
        )  # fmt: skip
    assert good[0].finish_reason == "length" and good[0].token_ids == alone[0].token_ids
    for output in (good[1], bad[0]):
        assert (output.finish_reason, output.token_ids, output.logprobs) == ("error", [], [])
        assert "scores for the next token are NaN" in output.error
