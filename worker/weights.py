"""Loading a checkpoint: each rank reads the slices it holds, straight into its parameters."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
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
_KINDS = ("F64", "F32", "F16", "BF16")
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


def _model_shards(model: nn.Module) -> dict[str, Shard]:
    """The model's shards by the name of their tensor in the checkpoint."""
    shards = {}
    for path, module in model.named_modules():
        if isinstance(module, Sharded):
            parent = path.rpartition(".")[0]
            for shard in module.shards():
                name = f"{parent}.{shard.name}" if parent else shard.name
                shards[name] = shard
    return shards


def _load_safetensors(shards: dict[str, Shard], path: Path, report: Progress) -> None:
    from safetensors import safe_open

    shapes_by_file = {file: _read_shapes(path / file) for file in _checkpoint_files(path)}
    _check_tensors(shards, path, {name: shape for shapes in shapes_by_file.values() for name, shape in shapes.items()})
    done = 0
    for file, shapes in shapes_by_file.items():
        with safe_open(path / file, framework="pt", device="cpu") as tensors:
            for name in filter(shards.__contains__, shapes):
                shard = shards[name]
                shard.target.copy_(tensors.get_slice(name)[shard.index])
                done += 1
                report("weights", done / len(shards))


def _checkpoint_files(path: Path) -> list[str]:
    index = path / INDEX_FILE
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
        absent = [file for file in files if not (path / file).is_file()]
        if absent:
            raise ModelError(f"{index} names files that are not there: {', '.join(absent)}; download them again")
        return files
    if (path / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    others = ", ".join(sorted(file.name for file in path.glob("*") if file.suffix in (".bin", ".pt", ".gguf")))
    raise ModelError(
        f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}"
        + (f" (it has {others}): convert it with transformers' save_pretrained" if others else "")
    )


def _read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The tensors in a file and their shapes; reads its header only."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            kinds = {name: slice.get_dtype() for name, slice in slices.items()}
            shapes = {name: tuple(slice.get_shape()) for name, slice in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {file}: {error}; the file may be incomplete") from error
    odd = [f"{name} is {kind}" for name, kind in kinds.items() if kind not in _KINDS and not name.endswith(_IGNORED)]
    if odd:
        raise ModelError(
            f"{file} does not hold floating-point numbers of 16 bits or more (quantized checkpoints are not "
            f"supported):\n  " + "\n  ".join(_shorten(odd))
        )
    return shapes


def _check_tensors(shards: dict[str, Shard], path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise before anything is loaded if the checkpoint and the model disagree."""
    problems = [f"missing: {name}" for name in shards if name not in shapes]
    for name, shape in shapes.items():
        if name in shards:
            expected = shards[name].full_shape
            if shape != expected:
                problems.append(f"shape of {name}: checkpoint {list(shape)}, model {list(expected)}")
        elif not name.endswith(_IGNORED):
            problems.append(f"unexpected: {name}")
    if problems:
        raise ModelError(f"the weights in {path} do not fit its config.json:\n  " + "\n  ".join(_shorten(problems)))


def _shorten(problems: list[str], limit: int = 20) -> list[str]:
    if len(problems) <= limit:
        return problems
    return [*problems[:limit], f"and {len(problems) - limit} more"]


def _fill_dummy(model: nn.Module, shards: dict[str, Shard], report: Progress) -> None:
    """Random values that depend on the tensor's name and slice only, so ranks that hold the same slice agree."""
    norms = {module.weight.data_ptr() for module in model.modules() if isinstance(module, RMSNorm)}
    for done, (name, shard) in enumerate(shards.items(), start=1):
        if shard.target.data_ptr() in norms:
            shard.target.fill_(1.0)
        else:
            generator = torch.Generator(shard.target.device)
            generator.manual_seed(zlib.crc32(f"{name}{shard.index}".encode()))
            shard.target.normal_(0.0, _DUMMY_STD, generator=generator)
        report("weights", done / len(shards))
