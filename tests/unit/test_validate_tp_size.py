"""A Serve file's tp_size against the model, where its shape is known without its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from gguf import GGUFReader

from cluster.default_model import NAME, find_gguf
from cluster.gguf_convert import model_config
from cluster.presets import PRESETS, preset_of, write_preset
from cluster.progress import no_progress
from cluster.validate import validate_files
from worker.model_config import ModelConfig, check_tp_size

SERVE = sorted((Path(__file__).parents[2] / "ray_configs/serve").glob("*.yaml"))
UNKNOWN = {"tp16-two-nodes"}


@pytest.mark.parametrize("file", SERVE, ids=lambda path: path.stem)
def test_the_model_of_a_shipped_file_takes_its_tp_size(file: Path, tmp_path: Path) -> None:
    """All but the ones in UNKNOWN are of a known shape, so that `validate` looks at them too."""
    (application,) = yaml.safe_load(file.read_text())["applications"]
    preset = preset_of(application["args"].get("model"), dummy=False)
    assert (preset is None) == (file.stem in UNKNOWN)
    if preset is not None:
        check_tp_size(ModelConfig.from_pretrained(write_preset(preset, tmp_path)), application["args"]["tp_size"])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("{tp_size: 2}", "SmolLM2-135M-Instruct: tensor-parallel size 2 does not divide"),
        ("{tp_size: 3}", None),
        ("{tp_size: 2, device: fake}", None),  # holds no model
        ("{tp_size: 7, model: org/unknown}", None),
        ("{tp_size: 7, model: Qwen3-0.6B, load_format: dummy}", "sizes that work are 1, 2, 4, 8, 16"),
        ("{tp_size: 7, model: Qwen/Qwen3-0.6B}", "sizes that work are 1, 2, 4, 8, 16"),
    ],
)
def test_a_known_shape_has_to_divide(args: str, says: str | None, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"applications: [{{import_path: 'cluster.serve:build_openai_app', args: {args}}}]\n")
    problems = validate_files([str(file)]).problems
    assert [problem.key for problem in problems] == ["applications[0].args.tp_size"] * (says is not None)
    assert all(says in problem.message for problem in problems)


def test_the_default_model_has_the_shape_that_is_written_down(tmp_path: Path) -> None:
    """Of the numbers alone: names and rope come in another form."""
    real = model_config(GGUFReader(find_gguf(tmp_path, no_progress)))
    preset = PRESETS[NAME]
    assert {key: value for key, value in preset.items() if key != "rope_parameters"}.items() <= real.items()
    assert preset["rope_parameters"]["rope_theta"] == real["rope_theta"]
