"""Loading a checkpoint: each rank reads the slices it holds, straight into its parameters."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from worker.errors import ModelError
from worker.layers.norm import RMSNorm
from worker.layers.shard import Shard, Sharded
from worker.models.context import ModelContext

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# What a checkpoint may hold beyond the model's own tensors: a tied head, and rope buffers of early Llama exports.
_IGNORED = ("lm_head.weight", "rotary_emb.inv_freq")
_DUMMY_STD = 0.02

Progress = Callable[[str, float], None]


def load_weights(
    model: nn.Module,
    path: str | Path,
    ctx: ModelContext,
    progress: Progress | None = None,
    load_format: str = "safetensors",
) -> None:
    """Fill the model's parameters and bring them into the form that runs fastest. Call once.

    Values are converted to `ctx.dtype`. On CUDA a rank never holds more of a tensor than its own slice.

    Args:
        path: directory with model.safetensors, or with an index and the files it names. Unused for "dummy".
        progress: called with ("weights", fraction of the tensors done).
        load_format: "safetensors", or "dummy": small random numbers, the same in every run.

    Raises:
        ModelError: no safetensors, unreadable files, or tensors missing, unexpected or of another shape: lists them.
    """
    shards = _model_shards(model)
    report = progress or (lambda phase, fraction: None)
    if load_format == "dummy":
        _fill_dummy(model, shards, report)
    elif load_format == "safetensors":
        _load_safetensors(shards, Path(path), report)
    else:
        raise ModelError(f"load_format {load_format!r} is unknown: known are safetensors, dummy")
    for module in model.modules():
        if isinstance(module, Sharded):
            module.finalize()
    if ctx.device.type == "cuda":
        torch.cuda.synchronize(ctx.device)


def _model_shards(model: nn.Module) -> dict[str, list[Shard]]:
    """The model's shards by checkpoint name. A name may have several."""
    shards = defaultdict(list)
    for path, module in model.named_modules():
        if isinstance(module, Sharded):
            parent = path.rpartition(".")[0]
            for shard in module.shards():
                name = f"{parent}.{shard.name}" if parent else shard.name
                shards[name].append(shard)
    return shards


def _load_safetensors(shards: dict[str, list[Shard]], path: Path, report: Progress) -> None:
    from safetensors import SafetensorError, safe_open

    names_by_file = _checkpoint_files(path)
    try:
        _check_tensors(shards, path, names_by_file)
        done = 0
        for file, names in names_by_file.items():
            with safe_open(path / file, framework="pt", device="cpu") as tensors:
                for name in names:
                    for shard in shards.get(name, ()):
                        shard.target.copy_(tensors.get_slice(name)[shard.index])
                    done += name in shards
                    report("weights", done / len(shards))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read the weights in {path}: {error}") from error


def _checkpoint_files(path: Path) -> dict[str, list[str]]:
    """Each safetensors file of the checkpoint, and the tensors in it."""
    from safetensors import SafetensorError, safe_open

    index = path / INDEX_FILE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
        files = sorted(set(weight_map.values()))
    elif (path / SINGLE_FILE).is_file():
        files = [SINGLE_FILE]
    else:
        found = ", ".join(sorted(file.name for file in path.glob("*") if file.suffix in (".bin", ".pt", ".gguf")))
        raise ModelError(
            f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}"
            + (f" (it has {found}): convert it with transformers' save_pretrained" if found else "")
        )
    absent = [file for file in files if not (path / file).is_file()]
    if absent:
        raise ModelError(f"{index} names files that are not there: {', '.join(absent)}; download them again")
    names = {}
    for file in files:
        try:
            with safe_open(path / file, framework="pt", device="cpu") as tensors:
                names[file] = list(tensors.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {path / file}: {error}; the file may be incomplete") from error
    return names


def _check_tensors(shards: dict[str, list[Shard]], path: Path, names_by_file: dict[str, list[str]]) -> None:
    """Raise before anything is loaded if the checkpoint and the model disagree."""
    from safetensors import safe_open

    problems, found = [], set()
    for file, names in names_by_file.items():
        with safe_open(path / file, framework="pt", device="cpu") as tensors:
            for name in names:
                found.add(name)
                if name in shards:
                    shape = tuple(tensors.get_slice(name).get_shape())
                    expected = shards[name][0].full_shape
                    if shape != expected:
                        problems.append(f"shape of {name}: checkpoint {list(shape)}, model {list(expected)}")
                elif not name.endswith(_IGNORED):
                    problems.append(f"unexpected: {name}")
    problems += [f"missing: {name}" for name in shards if name not in found]
    if problems:
        raise ModelError(f"the weights in {path} do not fit its config.json:\n  " + "\n  ".join(_shorten(problems)))


def _shorten(problems: list[str], limit: int = 20) -> list[str]:
    if len(problems) <= limit:
        return problems
    return [*problems[:limit], f"and {len(problems) - limit} more"]


def _fill_dummy(model: nn.Module, shards: dict[str, list[Shard]], report: Progress) -> None:
    """Random values that depend on the tensor's name and slice only, so ranks that hold the same slice agree."""
    norms = {module.weight.data_ptr() for module in model.modules() if isinstance(module, RMSNorm)}
    for done, (name, shard) in enumerate(_flat(shards), start=1):
        if shard.target.data_ptr() in norms:
            shard.target.fill_(1.0)
        else:
            generator = torch.Generator(shard.target.device)
            generator.manual_seed(zlib.crc32(f"{name}{shard.index}".encode()))
            shard.target.normal_(0.0, _DUMMY_STD, generator=generator)
        report("weights", done / sum(map(len, shards.values())))


def _flat(shards: dict[str, list[Shard]]) -> Iterator[tuple[str, Shard]]:
    return ((name, shard) for name, parts in shards.items() for shard in parts)
