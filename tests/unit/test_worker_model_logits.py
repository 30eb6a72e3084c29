"""Logits against transformers: every family, option, rope variant, tensor-parallel size, page size and layout."""

from __future__ import annotations

import json

import pytest
import torch

from kvcache.pool import KVCacheLayout
from tests.checkpoints import load_reference, make_checkpoint
from tests.unit.worker_model_harness import ModelRig

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}

CHECKPOINTS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-mha": ("llama", {"num_key_value_heads": 8}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-files": ("llama", {"max_shard_size": "40KB"}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "llama-yarn": ("llama", {"rope_parameters": YARN, "head_dim": 32}),
    "llama-yarn-factor": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.5}}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}}),
    "llama-yarn-betas": ("llama", {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}}),
    "mistral": ("mistral", {}),
    "mistral-head-dim-tied": ("mistral", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 64}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}
# Chunked prefills, decodes beside prefills of other rows, pure decodes; rows join in an order unlike their numbers.
STEPS = [
    {2: 7},
    {2: 5, 0: 9},
    {0: 1, 2: 6, 3: 1},
    {3: 11, 2: 1, 0: 1},
    {3: 1, 2: 1, 0: 1},
    {0: 1, 1: 20, 2: 1},
    {0: 1, 1: 1, 2: 1, 3: 1},
    {0: 1, 1: 1, 2: 1, 3: 1},
]
LENGTHS = {row: sum(step.get(row, 0) for step in STEPS) for row in range(4)}
# Row 0 passes position 32, the original length of the scaled ropes.
STEPS.append({0: 25, 2: 2})
LENGTHS[0] += 25
LENGTHS[2] += 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """name -> (path, token ids of each row, reference logits of each row), made once per module."""
    made = {}

    def make(name: str):
        if name not in made:
            family, options = CHECKPOINTS[name]
            path = make_checkpoint(family, tmp_path_factory.mktemp(name), **options)
            generator = torch.Generator().manual_seed(1)
            ids = {row: torch.randint(3, 101, (n,), generator=generator) for row, n in LENGTHS.items()}
            with torch.inference_mode():
                model = load_reference(path)
                reference = {row: model(tokens[None]).logits[0] for row, tokens in ids.items()}
            made[name] = path, {row: tokens.tolist() for row, tokens in ids.items()}, reference
        return made[name]

    return make


def assert_same_logits(path, ids, reference, atol=1e-4, **options) -> None:
    logits = ModelRig(path, **options).feed(ids, STEPS)
    for row, expected in reference.items():
        torch.testing.assert_close(logits[row], expected, atol=atol, rtol=0, msg=lambda m, row=row: f"row {row}: {m}")
        assert torch.equal(logits[row].argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(checkpoint, name):
    assert_same_logits(*checkpoint(name), page_size=4)


@pytest.mark.parametrize("tp_size", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama", "llama-bias", "llama-mha", "llama-one-kv-head", "llama-files", "mistral"])
def test_tensor_parallel(checkpoint, name, tp_size):
    """KV heads: 8, 2 and 1, so a size of 4 or 8 exceeds them; the vocabulary of 101 divides by none."""
    assert_same_logits(*checkpoint(name), tp_size=tp_size, page_size=4)


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(
    "name", ["llama-tied", "llama-head-dim", "mistral-head-dim-tied", "qwen2", "qwen2-tied-yarn", "qwen3",
             "qwen3-tied-bias"],
)  # fmt: skip
def test_tensor_parallel_families(checkpoint, name, tp_size):
    assert_same_logits(*checkpoint(name), tp_size=tp_size, page_size=16)


@pytest.mark.parametrize("layout", KVCacheLayout)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_pages(checkpoint, page_size, layout):
    assert_same_logits(*checkpoint("qwen3"), page_size=page_size, layout=layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(checkpoint, dtype):
    """bf16 keeps 8 bits of mantissa: logits of about 5 agree to a few hundredths."""
    path, ids, reference = checkpoint("qwen3")
    logits = ModelRig(path, dtype=dtype, page_size=4).feed(ids, STEPS)
    for row, expected in reference.items():
        assert logits[row].dtype == dtype
        assert (logits[row].float() - expected).abs().mean() < 0.02 * expected.abs().mean() + 0.01


@pytest.mark.parametrize("tp_size", [1, 2])
def test_without_onednn(checkpoint, monkeypatch, tp_size):
    """Plain weights and `F.linear`, as where torch comes without oneDNN."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert_same_logits(*checkpoint("llama-bias"), tp_size=tp_size, page_size=4)


def test_dynamic_rope_beyond_the_original_length(tmp_path):
    """Each new token is rotated for the length it ends, as in transformers' decode with a KV cache."""
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    path = make_checkpoint("llama", tmp_path, max_position_embeddings=16, rope_parameters=rope)
    ids = torch.randint(3, 101, (1, 40), generator=torch.Generator().manual_seed(2))
    reference, cache = [], None
    with torch.inference_mode():
        model = load_reference(path)
        for piece in ids.split([10] + [1] * 30, dim=1):
            output = model(piece, past_key_values=cache, use_cache=True)
            reference.append(output.logits[0])
            cache = output.past_key_values
    reference = torch.cat(reference)
    tokens = {0: ids[0].tolist()}
    decoded = ModelRig(path, page_size=4).feed(tokens, [{0: 10}] + [{0: 1}] * 30)[0]
    torch.testing.assert_close(decoded, reference, atol=1e-4, rtol=0)
    chunked = ModelRig(path, page_size=4).feed(tokens, [{0: 13}, {0: 14}, {0: 13}])[0]
    torch.testing.assert_close(chunked, reference, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_old_rope_settings(checkpoint, tmp_path, rope_type):
    """A config.json with `rope_theta` and `rope_scaling`, as written before transformers 5."""
    path, ids, reference = checkpoint(f"llama-{rope_type}")
    config = json.loads((path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = {"type": scaling.pop("rope_type")} | scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    assert_same_logits(tmp_path, ids, reference, page_size=4)


def test_a_row_does_not_depend_on_its_neighbours(checkpoint):
    """The same row alone: equal up to the rounding of other shapes of product."""
    path, ids, _ = checkpoint("qwen2")
    together = ModelRig(path, page_size=3).feed(ids, STEPS)
    steps = [{2: step[2]} for step in STEPS if 2 in step]
    alone = ModelRig(path, page_size=3).feed({2: ids[2]}, steps)
    torch.testing.assert_close(alone[2], together[2], atol=2e-5, rtol=0)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("family", ["llama-bias", "qwen3"])
def test_outputs_alone_are_those_of_all_tokens(tmp_path, family, tp_size) -> None:
    """And the last layer stores the K/V of all of them."""
    path = make_checkpoint(CHECKPOINTS[family][0], tmp_path, **CHECKPOINTS[family][1])
    whole, narrow = ModelRig(path, tp_size), ModelRig(path, tp_size, outputs_only=True)
    for step in ({0: list(range(3, 20)), 2: [9, 8, 7]}, {2: [5], 0: [6], 1: list(range(40, 51))}, {0: [1], 1: [2]}):
        everything, last = whole.run(step), narrow.run(step)
        for row in step:
            assert last[row].shape[0] == 1
            torch.testing.assert_close(last[row][0], everything[row][-1], rtol=1e-5, atol=1e-5)
    for (one, _), (other, _) in zip(whole.ranks, narrow.ranks, strict=True):
        torch.testing.assert_close(one.ctx.pool.kv_buffer, other.ctx.pool.kv_buffer, rtol=1e-5, atol=1e-5)
