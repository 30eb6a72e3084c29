"""From what the user calls a model to a checkpoint directory on this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cluster.default_model import NAME as DEFAULT_NAME
from cluster.default_model import default_cache_dir, ensure_default_model
from cluster.errors import ModelLoadError
from cluster.presets import PRESETS, write_preset
from cluster.progress import Progress, no_progress

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]


def resolve_model(
    model: str | None, progress: Progress = no_progress, cache_dir: str | Path | None = None, dummy: bool = False
) -> Path:
    """The directory with the model's config.json, weights and tokenizer.

    Args:
        model: None for the default model; else a local directory, or a hub id such as `Qwen/Qwen3-0.6B`, which is
            downloaded into the hub's own cache.
        progress: called while something is converted or downloaded.
        cache_dir: where the default model is kept; None for `default_cache_dir()`.
        dummy: weights are not wanted, so the name of a preset (`cluster.presets`) will do.

    Raises:
        ModelLoadError: no such directory, not a checkpoint, or the hub cannot be reached; says which.
    """
    cache = Path(cache_dir).absolute() if cache_dir else None
    if model is None:
        return ensure_default_model(cache, progress)
    if dummy and model in PRESETS:
        return write_preset(model, (cache or default_cache_dir()) / "presets")
    path = Path(model).expanduser().absolute()  # ranks may have another working directory
    try:
        is_dir, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # a name that is too long, a directory that may not be read
        raise ModelLoadError(f"model {model}: {error.strerror}") from error
    if is_dir:
        return check_checkpoint(path)
    if is_file:
        raise ModelLoadError(
            f"model {model} is a file; name the checkpoint's directory (config.json and *.safetensors)"
        )
    if not HUB_ID.fullmatch(model):
        raise ModelLoadError(f"model {model}: no such directory, and not of the form of a hub id (owner/name)")
    return check_checkpoint(download(model, progress))


def served_name(model: str | None) -> str:
    """The name clients use when none was configured: the hub id as given, or the directory's name."""
    if model is None:
        return DEFAULT_NAME
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


def check_checkpoint(path: Path) -> Path:
    """`path` itself, if it looks like a checkpoint; what the tensors must be is checked where they are loaded."""
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{path} is not a checkpoint: it has no config.json")
    return path


def download(hub_id: str, progress: Progress) -> Path:
    """The snapshot of `hub_id` in the hub's cache, downloaded where files are missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    progress(f"downloading {hub_id}", 0.0)
    try:
        path = snapshot_download(hub_id, allow_patterns=HUB_FILES, tqdm_class=progress_bar(hub_id, progress))
    except GatedRepoError as error:
        raise ModelLoadError(
            f"model {hub_id} is gated: accept its terms on the hub, then log in (hf auth login)"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"model {hub_id}: no such directory here and no such model on the hub") from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"model {hub_id} is not in the local hub cache and the hub cannot be reached; "
            "connect to the network, or name a local directory"
        ) from error
    except Exception as error:  # the hub client also lets errors of its HTTP library and of the disk through
        raise ModelLoadError(f"model {hub_id} could not be downloaded: {error}") from error
    progress(f"downloaded {hub_id}", 1.0)
    return Path(path)


def progress_bar(hub_id: str, progress: Progress) -> type[Any]:
    """A tqdm class that reports to `progress` instead of drawing. The hub client counts files and bytes with it."""
    from tqdm import tqdm

    class Bar(tqdm):
        reported = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # the hub client's own argument
            super().__init__(*args, **kwargs)

        def display(self, *args: Any, **kwargs: Any) -> None:
            if self.unit == "B" and self.total and self.n > self.reported:  # it also draws when it is closed
                self.reported = self.n
                progress(f"downloading {hub_id}", min(self.n / self.total, 1.0))

    return Bar
