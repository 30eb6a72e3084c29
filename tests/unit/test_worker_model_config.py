"""Reading configurations, tensor-parallel sizes, limits; the process group."""

from __future__ import annotations

import json

import pytest
import torch
import torch.multiprocessing as mp
from transformers import AutoConfig, GemmaConfig

from tests.checkpoints import FAMILIES, load_reference, make_checkpoint, make_config
from tests.unit.worker_model_harness import ThreadTPGroup, gloo_rank
from worker.attention import create_attention_backend
from worker.errors import ModelError
from worker.model_config import ModelConfig, valid_tp_sizes
from worker.models.registry import ModelContext, create_model
from worker.parallel import TPGroup, init_tp_group

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}


def convert(family: str, **overrides) -> ModelConfig:
    return ModelConfig.from_pretrained(make_config(family, **overrides))


def create(config: ModelConfig, tp_size: int = 1, max_seq_len: int | None = None):
    tp = ThreadTPGroup.create(tp_size)[0]
    device = torch.device("cpu")
    ctx = ModelContext(tp, create_attention_backend("auto", device), torch.float32, device, max_seq_len=max_seq_len)
    return create_model(config, ctx)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "intermediate", "sizes"),
    [
        (9, 3, 1536, [1, 3]),
        (8, 2, 96, [1, 2, 4, 8]),
        (12, 4, 96, [1, 2, 4, 12]),
        (32, 8, 14336, [1, 2, 4, 8, 16, 32]),
        (14, 2, 4864, [1, 2]),
    ],
)
def test_valid_tp_sizes(heads, kv_heads, intermediate, sizes):
    config = convert(
        "llama", num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=intermediate,
        hidden_size=heads * 8,
    )  # fmt: skip
    assert valid_tp_sizes(config) == sizes


def test_a_size_that_does_not_divide():
    config = convert("llama", num_attention_heads=9, num_key_value_heads=3, hidden_size=72)
    with pytest.raises(ModelError, match=r"size 2 does not divide .*9 attention heads, 3 KV heads.* work are 1, 3"):
        create(config, tp_size=2)


@pytest.mark.parametrize(
    ("family", "overrides", "limit"),
    [
        ("llama", {}, 256),
        ("llama", {"rope_parameters": LINEAR}, 1024),
        ("llama", {"rope_parameters": LINEAR | {"rope_type": "dynamic"}}, 1024),
        ("qwen2", {"rope_parameters": YARN}, 512),
        ("mistral", {"sliding_window": 100}, 100),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16}, 256),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, 16),
    ],
)
def test_context_limit(family, overrides, limit):
    assert convert(family, **overrides).context_limit == limit


def test_max_seq_len_beyond_the_limit():
    with pytest.raises(ModelError, match=r"max_seq_len 300 exceeds the model's limit of 256 tokens: set max_seq_len"):
        create(convert("llama"), max_seq_len=300)
    with pytest.raises(ModelError, match=r"101 exceeds .* sliding attention window of 100 .*set max_seq_len to 100"):
        create(convert("mistral", sliding_window=100), max_seq_len=101)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GemmaConfig(), "model type 'gemma' is not supported: supported are llama, mistral, qwen2, qwen3"),
        (make_config("llama", hidden_act="gelu"), "activation 'gelu' is not supported"),
        (make_config("llama", quantization_config={"quant_method": "fp8"}), "quantized checkpoints"),
        (
            make_config(
                "llama",
                rope_parameters=LINEAR | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
            ),
            "rope type 'longrope' is not supported: supported are default, linear",
        ),
    ],
)
def test_what_is_refused(config, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_pretrained(config)


def test_a_directory_that_is_no_checkpoint(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match="no-such-model"):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((family, {}) for family in FAMILIES),  # everything left to the defaults
        ("llama", {"rope_theta": 500_000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {"rope_scaling": None, "torch_dtype": "bfloat16", "num_key_value_heads": 8}),
        ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500_000.0, "eos_token_id": [1, 2]}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "dtype": "float16", "head_dim": 64}),
        ("mistral", {"sliding_window": None, "hidden_size": 5120, "head_dim": 128}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("qwen3", {"tie_word_embeddings": True, "rope_theta": 1_000_000, "attention_bias": True}),
    ],
    ids=str,
)
def test_config_json_as_transformers_reads_it(family, settings, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **settings}))
    assert ModelConfig.from_pretrained(tmp_path) == ModelConfig.from_pretrained(AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", 0),
        ("num_hidden_layers", 2.0),
        ("vocab_size", None),
        ("max_position_embeddings", -1),
        ("sliding_window", "x"),
        ("rms_norm_eps", "x"),
        ("rope_scaling", "linear"),
        ("eos_token_id", "2"),
        ("eos_token_id", [1, -1]),
        ("eos_token_id", 1 << 31),
    ],
)
def test_odd_values_are_named(tmp_path, setting, value):
    path = make_checkpoint("llama", tmp_path)
    (path / "generation_config.json").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {setting: value}))
    with pytest.raises(ModelError, match=setting):
        ModelConfig.from_pretrained(path)


def test_eos_token_ids(tmp_path):
    path = make_checkpoint("llama", tmp_path, eos_token_id=7)
    generation = path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert ModelConfig.from_pretrained(path).eos_token_ids == (5, 6)
    generation.write_text("{}")
    assert ModelConfig.from_pretrained(path).eos_token_ids == (7,)
    generation.unlink()
    assert ModelConfig.from_pretrained(path).eos_token_ids == (7,)
    generation.write_text("not json")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        ModelConfig.from_pretrained(path)


def test_group_of_one():
    group = init_tp_group(0, 1, "cpu", "unused://", timeout=1.0)
    tensor = torch.ones(3)
    assert group.all_reduce(tensor) is tensor and group.all_gather(tensor, 0) is tensor
    group.barrier()
    group.destroy()
    with pytest.raises(ValueError, match="needs a process group"):
        TPGroup(0, 2, None)
    with pytest.raises(ValueError, match="rank 2 is not within"):
        TPGroup(2, 2, None)


def test_gloo_processes(tmp_path):
    """Two real ranks: collectives, whether they share a host, and a model over them."""
    path = make_checkpoint("qwen2", tmp_path / "model")
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(gloo_rank, args=(2, str(tmp_path / "store"), str(path), results), nprocs=2)
    summed, gathered, why, logits = results.get()
    assert summed == [3.0, 3.0] and gathered == [[0, 1], [0, 1]]
    assert why == [None, "the ranks are on several hosts", "torch reduces torch.float16 through NCCL alone"]
    with torch.inference_mode():
        expected = load_reference(path)(torch.arange(3, 15)[None]).logits[0]
    torch.testing.assert_close(torch.tensor(logits), expected, atol=1e-4, rtol=0)
