"""The in-process executor: the same engine without Ray and sockets."""

import numpy as np
import pytest
import torch

from cluster import LLM, SamplingParams
from cluster.errors import ConfigError, ModelLoadError
from tests.checkpoints import load_reference, make_checkpoint

SIZES = {"num_pages": 64, "max_running_requests": 4, "max_step_tokens": 16, "executor": "inproc", "device": "cpu"}


def test_tokens_equal_transformers(tmp_path):
    path = make_checkpoint("qwen3", tmp_path)
    prompts = [np.random.default_rng(n).integers(3, 100, n).tolist() for n in (1, 9, 30)]
    with LLM(str(path), page_size=4, **SIZES) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        assert llm.info.startup_seconds.get("ray") is None
    model = load_reference(path)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert output.token_ids == expected[0, len(prompt) :].tolist()


def test_a_tokenizer_that_cannot_be_read_is_not_taken_for_none(tmp_path):
    path = make_checkpoint("llama", tmp_path)
    (path / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"cannot read .*tokenizer\.json"):
        LLM(str(path), **SIZES)


def test_errors_keep_their_kind(tmp_path):
    path = make_checkpoint("llama", tmp_path)
    with pytest.raises(ConfigError, match="one rank, not tp_size 2; use executor ray"):
        LLM(str(path), tp_size=2, **SIZES)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):
        LLM(str(path), **SIZES)
