"""Loading checkpoints: slices, errors, dummy weights."""

from __future__ import annotations

import json

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.unit.worker_model_harness import ModelRig, ThreadTPGroup
from worker.attention import create_attention_backend
from worker.errors import ModelError
from worker.model_config import ModelConfig
from worker.models.registry import ModelContext, create_model
from worker.parallel import TPGroup
from worker.weights import load_weights


def load(path, tp=None, load_format="safetensors", progress=None, dtype=torch.float32, source=None):
    ctx = ModelContext(tp or TPGroup.single(), create_attention_backend("auto", "cpu"), dtype, torch.device("cpu"))
    model = create_model(ModelConfig.from_pretrained(source or path), ctx)
    load_weights(model, path, ctx, progress, load_format)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def edit(llama, tmp_path):
    """A copy of the checkpoint with its tensors changed."""

    def edited(change):
        tensors = load_file(llama / "model.safetensors")
        change(tensors)
        (tmp_path / "config.json").write_text((llama / "config.json").read_text())
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return edited


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_tensors_are_refused(edit, dtype):
    def change(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64).to(dtype)

    with pytest.raises(ModelError, match=r"quantized(.|\n)*layers\.0\.mlp\.up_proj\.weight is "):
        load(edit(change))


def test_all_problems_are_listed(edit):
    def change(tensors):
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        del tensors["lm_head.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(95, 64)
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(8)

    with pytest.raises(ModelError) as error:
        load(edit(change))
    message = str(error.value)
    assert "missing: model.layers.1.self_attn.k_proj.weight" in message
    assert "missing: lm_head.weight" in message
    assert "unexpected: model.layers.0.self_attn.q_norm.weight" in message
    assert "shape of model.layers.0.mlp.up_proj.weight: checkpoint [95, 64], model [96, 64]" in message


def test_long_lists_are_cut(edit):
    with pytest.raises(ModelError, match="and 1 more"):
        load(edit(lambda tensors: tensors.clear()))


def test_tensors_that_do_no_harm_are_ignored(llama, edit, tmp_path_factory):
    load(edit(lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})))
    tied = make_checkpoint("llama", tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)
    tensors = load_file(tied / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(101, 64)
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    assert load(tied).compute_logits(torch.ones(1, 64)).abs().max() > 0


def test_files_that_cannot_be_read(llama, tmp_path):
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"it has pytorch_model\.bin\): convert it"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: .*may be incomplete"):
        load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match=r"not there: model-00002-of-00002\.safetensors"):
        load(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelError, match="not a safetensors index"):
        load(tmp_path)


def test_progress(tmp_path):
    path = make_checkpoint("qwen3", tmp_path, max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    reports = []
    load(path, progress=lambda phase, fraction: reports.append((phase, fraction)))
    fractions = [fraction for _, fraction in reports]
    assert {phase for phase, _ in reports} == {"weights"}
    assert fractions == sorted(fractions) and fractions[-1] == 1.0


def test_a_rank_reads_only_its_slices(llama, monkeypatch):
    read = []
    real = safetensors.safe_open

    class Counting:
        def __init__(self, *args, **kwargs):
            self.file = real(*args, **kwargs)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *args):
            return self.file.__exit__(*args)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            source = self.file.get_slice(name)

            class Slice:
                def get_dtype(self):
                    return source.get_dtype()

                def get_shape(self):
                    return source.get_shape()

                def __getitem__(self, index):
                    value = source[index]
                    read.append(value.numel())
                    return value

            return Slice()

    monkeypatch.setattr(safetensors, "safe_open", Counting)
    tp = ThreadTPGroup.create(4)[1]
    load(llama, tp=tp)
    # Split four ways but for KV heads (two, so halves) and norms; the vocabulary of 101 is padded to 4 x 32.
    per_layer = 64 * (16 + 32 // 4 * 2 // 2 * 2 + 16) + 3 * 64 * 24 + 2 * 64
    assert sum(read) == 2 * 32 * 64 + 64 + 2 * per_layer


def test_dummy_weights(llama, tmp_path):
    first, second = (load(llama, load_format="dummy") for _ in range(2))
    hidden = torch.randn(3, 64)
    logits = first.compute_logits(hidden)
    assert torch.equal(logits, second.compute_logits(hidden))
    assert 0 < logits[:, :101].abs().max() < 2
    assert torch.equal(first.model.norm.weight, torch.ones(64))
    # Needs no weights on disk, and ranks that hold the same KV head agree on it.
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    ranks = []
    for tp in ThreadTPGroup.create(4):
        ctx = ModelContext(tp, create_attention_backend("auto", "cpu"), torch.float32, torch.device("cpu"))
        model = create_model(ModelConfig.from_pretrained(tmp_path), ctx)
        weights = model.model.layers[0].self_attn.qkv_proj.weight
        load_weights(model, tmp_path, ctx, load_format="dummy")
        ranks.append(weights)
    assert torch.equal(ranks[0][16:], ranks[1][16:]) and not torch.equal(ranks[0][16:], ranks[2][16:])
    assert not torch.equal(ranks[0][:16], ranks[1][:16])


def test_unknown_load_format(llama):
    with pytest.raises(ModelError, match="load_format 'gguf' is unknown"):
        load(llama, load_format="gguf")


def test_checkpoint_dtype_is_converted(llama, tmp_path):
    path = make_checkpoint("llama", tmp_path, dtype=torch.bfloat16)
    assert ModelConfig.from_pretrained(path).dtype == torch.bfloat16
    ids = {0: list(range(3, 13))}
    half, full = (ModelRig(source, page_size=4).feed(ids, [{0: 10}])[0] for source in (path, llama))
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, full, atol=0.2, rtol=0)
