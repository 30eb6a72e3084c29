"""The in-process executor: the same engine without Ray and sockets."""

import json
import re

import jsonschema
import numpy as np
import pytest
import torch

from cluster import LLM, SamplingParams
from cluster.errors import ConfigError, InvalidRequestError, ModelLoadError
from tests.checkpoints import load_reference, make_checkpoint
from tests.unit import tiny_tokenizers

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


def test_what_is_no_prompt_is_refused_and_the_engine_goes_on(tmp_path):
    path = make_checkpoint("llama", tmp_path, vocab_size=400)
    tiny_tokenizers.byte_level(path)
    with LLM(str(path), **SIZES) as llm:
        for prompts in (None, 5, {"prompt": "x"}, {3}, iter(["a"]), b"abc"):
            with pytest.raises(InvalidRequestError, match="must be a text or a list, not"):
                llm.generate(prompts)
        for prompt in (None, 3, 5.5, "\ud800", [[1], [2, 3]], ["a"], [1.5], {"a": 1}):
            with pytest.raises(InvalidRequestError, match="prompt 1: "):
                llm.generate(["a", prompt])
        for sampling in (5, {"max_tokens": 3}, [SamplingParams(), None]):
            with pytest.raises(InvalidRequestError, match=r"sampling_params|prompt 1: not SamplingParams"):
                llm.generate(["a", "b"], sampling)
        assert len(llm.generate([[3, 4]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
        assert llm.stats()["free_pages"] == 64


def test_a_stop_string_that_the_end_completes(tmp_path):
    """The rest of a character that never came is U+FFFD, and that too may end the text."""
    path = make_checkpoint("llama", tmp_path, vocab_size=400)
    tiny_tokenizers.byte_level(path)
    with LLM(str(path), **SIZES) as llm:
        byte = llm.tokenizer.backend.token_to_id("\u00f0")  # 0xf0, as byte-level tokenizers write it
        sampling = SamplingParams(max_tokens=1, logit_bias={byte: 100}, stop="\ufffd")
        (output,) = llm.generate([3, 4], sampling)
    assert (output.token_ids, output.text, output.finish_reason) == ([byte], "", "stop")


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


def test_outputs_of_a_given_form_beside_free_ones(tmp_path):
    """Random weights, so that only the form makes sense; more requests than rows, prompts longer than a step."""
    path = make_checkpoint("llama", tmp_path, vocab_size=400)
    tiny_tokenizers.byte_level(path)
    free = SamplingParams(temperature=1.0, seed=4, max_tokens=20, ignore_eos=True)
    schema = {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 1, "maxItems": 3}
    forms = [{"regex": "[ab]{3}-[0-9]{2}"}, {"choice": ["yes", "no, thanks"]}, {"json": schema}]
    bound = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=90, structured_outputs=form)
        for seed in range(3)
        for form in forms
    ]
    prompts = ["hello world, " * 4 + str(number) for number in range(len(bound) + 2)]
    with LLM(str(path), **SIZES) as llm:
        alone = [output.token_ids for output in llm.generate(prompts[:2], free)]
        outputs = llm.generate(prompts, [free, free, *bound])
        assert [output.token_ids for output in outputs[:2]] == alone
        for params, output in zip(bound, outputs[2:], strict=True):
            wanted = params.structured_outputs
            assert output.finish_reason == "stop", output
            if wanted.regex:
                assert re.fullmatch(wanted.regex, output.text)
            elif wanted.choice:
                assert output.text in wanted.choice
            else:
                jsonschema.validate(json.loads(output.text), schema)
        with pytest.raises(InvalidRequestError, match="prompt 1: structured_outputs: ") as caught:
            llm.generate(["a", "b"], [free, SamplingParams(structured_outputs={"regex": "("})])
        assert caught.value.param == "structured_outputs"
