"""What a model's name may be, and what is said when there is no such model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from cluster import model_files
from cluster.errors import ModelLoadError
from cluster.model_files import resolve_model, served_name
from tests.unit.hub_server import hub


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    path = tmp_path / "tiny-llama"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_a_directory_is_taken_as_it_is(checkpoint):
    assert resolve_model(str(checkpoint)) == checkpoint
    assert served_name(str(checkpoint)) == "tiny-llama"
    assert served_name(None) == "SmolLM2-135M-Instruct"
    assert served_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("model", ["/no/such/dir", "./no/such", "a/b/c", "has space/x", "-x/y"])
def test_neither_directory_nor_hub_id(model):
    with pytest.raises(ModelLoadError, match="no such directory, and not of the form of a hub id"):
        resolve_model(model)


def test_a_relative_directory_becomes_absolute(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint.parent)  # ranks may have another working directory
    assert resolve_model(checkpoint.name) == checkpoint


def test_a_name_that_no_file_can_have():
    with pytest.raises(ModelLoadError, match="too long"):
        resolve_model("x" * 5000)


def test_not_a_checkpoint(tmp_path, checkpoint):
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelLoadError, match="is a file; name the checkpoint's directory"):
        resolve_model(str(checkpoint / "config.json"))


def test_default_model_comes_from_the_cache_dir(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(model_files, "ensure_default_model", lambda cache, progress: asked.append(cache) or tmp_path)
    assert resolve_model(None, cache_dir=tmp_path / "cache") == tmp_path
    resolve_model(None)
    assert asked == [tmp_path / "cache", None]


def test_a_hub_id_is_downloaded_with_progress(monkeypatch, checkpoint):
    def snapshot_download(hub_id, allow_patterns, tqdm_class):
        assert hub_id == "owner/name" and "*.safetensors" in allow_patterns and "*.bin" not in allow_patterns
        with tqdm_class(total=100, name="hub's own", unit="B", mininterval=0) as bar:
            bar.update(25)
        return str(checkpoint)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    seen = []
    assert resolve_model("owner/name", lambda what, share: seen.append((what, share))) == checkpoint
    assert ("downloading owner/name", 0.25) in seen and seen[-1] == ("downloaded owner/name", 1.0)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("x"), "not in the local hub cache and the hub cannot be reached"),
        (OSError("disk full"), "could not be downloaded: disk full"),
    ],
)
def test_download_errors_are_clear(monkeypatch, error, message):
    def snapshot_download(*args, **kwargs):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ModelLoadError, match=message):
        resolve_model("owner/name")


RESOLVE = """
import sys
from cluster.errors import ModelLoadError
from cluster.model_files import resolve_model
try:
    print("path", resolve_model(sys.argv[1], lambda what, share: print(what, share)))
except ModelLoadError as error:
    print("error", error)
"""


def resolve_in_a_new_process(model: str, **environment: str) -> list[str]:
    """What RESOLVE prints; the hub client reads its environment when it is imported."""
    command = [sys.executable, "-c", RESOLVE, model]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, env={"PATH": "", **environment}, cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_real_download_from_a_hub_on_localhost_then_offline_from_its_cache(tmp_path):
    weights = bytes(range(256)) * 20_000
    files = {"config.json": b"{}", "model.safetensors": weights, "tokenizer.json": b"{}", "pytorch_model.bin": b"no"}
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    with hub("owner/name", files) as url:
        lines = resolve_in_a_new_process("owner/name", HF_ENDPOINT=url, **environment)
        path = Path(lines[-1].removeprefix("path "))
        assert {file.name for file in path.iterdir()} == files.keys() - {"pytorch_model.bin"}
        assert (path / "model.safetensors").read_bytes() == weights
        shares = [float(line.split()[-1]) for line in lines if line.startswith("downloading owner/name")]
        assert shares[0] == 0 and shares[-1] == 1 and lines[-2] == "downloaded owner/name 1.0"

        missing = resolve_in_a_new_process("owner/other", HF_ENDPOINT=url, **environment)
        assert missing[-1] == "error model owner/other: no such directory here and no such model on the hub"
    again = resolve_in_a_new_process("owner/name", HF_HUB_OFFLINE="1", **environment)
    assert again[-1] == f"path {path}"


def test_offline_with_an_empty_cache(tmp_path):
    lines = resolve_in_a_new_process("owner/name", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert lines[-1].startswith("error model owner/name is not in the local hub cache and the hub cannot be reached")
