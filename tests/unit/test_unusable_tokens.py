"""Scores that allow no token (NaN, infinite): the request whose they are ends with an error, nobody else's."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from cluster import LLM, SamplingParams
from kvcache import CacheError, RadixPrefixCache
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


def damaged_checkpoint(directory: Path) -> Path:
    """Token 60 makes NaN of what it meets."""
    path = make_checkpoint("llama", directory)
    file = path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["model.embed_tokens.weight"][60, 3] = torch.nan
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    return path


def test_weights_with_a_nan_end_the_requests_that_meet_it(tmp_path: Path) -> None:
    path = damaged_checkpoint(tmp_path)
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


def test_a_prefix_that_was_computed_beside_a_nan_is_not_kept(tmp_path: Path) -> None:
    """A weight of zero times NaN is NaN: the K/V of tokens before the bad one is bad as well.

    It goes with the request's last step, which returns after the request has ended.
    """
    path = damaged_checkpoint(tmp_path)
    sizes = {"num_pages": 64, "max_running_requests": 4, "max_step_tokens": 64, "executor": "inproc", "device": "cpu"}
    known, new = list(range(3, 11)), list(range(20, 28))
    prompts = [[*known, 11], [*known, 60], [*known, 12], [*new, 60], [*new, 11]]
    with LLM(str(path), page_size=4, **sizes) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        outputs = []
        for prompt in prompts:
            outputs += llm.generate([prompt], sampling)
            while (stats := llm.stats())["running"]:
                time.sleep(0.001)
    found = [(output.finish_reason, output.cached_tokens) for output in outputs]
    assert found == [("length", 0), ("error", 8), ("length", 8), ("error", 0), ("length", 0)]
    assert stats["free_pages"] + stats["cached_pages"] == stats["total_pages"]


def test_forgetting_stops_at_what_others_need() -> None:
    tree = RadixPrefixCache(page_size=2)
    ids = np.arange(8, dtype=np.int32)
    other = np.array([0, 1, 9, 9], dtype=np.int32)
    tree.insert_prefix(ids, ids)
    tree.insert_prefix(other, np.array([0, 1, 8, 9], dtype=np.int32))
    long = tree.match_prefix(ids).handle
    upper = tree.match_prefix(ids[:4]).handle
    tree.lock_handle(long)
    assert not tree.forget(long).size  # in use
    tree.lock_handle(long, unlock=True)
    tree.lock_handle(upper)
    assert sorted(tree.forget(long).tolist()) == [4, 5, 6, 7]
    tree.check_integrity([upper])
    with pytest.raises(CacheError, match="stale"):
        tree.forget(long)
    tree.lock_handle(upper, unlock=True)
    assert sorted(tree.forget(upper).tolist()) == [2, 3]  # what both begin with stays
    tree.check_integrity([])
    assert tree.match_prefix(other).handle.cached_len == 4 and tree.match_prefix(ids).handle.cached_len == 2
    assert tree.size_info == (4, 0)
