"""Command-line flags made from the settings' own definitions, so that both cannot disagree."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from cluster.config import EngineConfig, describe
from cluster.errors import ConfigError


def add_engine_flags(parser: argparse.ArgumentParser, positional_model: bool) -> None:
    """All of EngineConfig's settings, and `--config`; read them back with `engine_config`."""
    if positional_model:
        parser.add_argument("model", nargs="?", help=help_text("model", EngineConfig.model_fields["model"]))
        parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same as a flag")
    else:
        parser.add_argument(
            "--model", dest="model_flag", metavar="MODEL", help=help_text("model", EngineConfig.model_fields["model"])
        )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings (underscores); flags come before it")
    group = parser.add_argument_group("engine settings")
    add_model_flags(group, EngineConfig, leave_out={"model"})


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The settings: flags, then the config file's, then defaults.

    Raises:
        ConfigError: a value is wrong; names each.
    """
    positional = getattr(args, "model", None)
    if None not in (positional, args.model_flag) and positional != args.model_flag:
        raise ConfigError(f"two models: {positional} and --model {args.model_flag}; name one")
    values = {name: getattr(args, name) for name in EngineConfig.model_fields if name != "model"}
    return EngineConfig.load(args.config, model=args.model_flag if positional is None else positional, **values)


def parse_model(model: type[BaseModel], args: argparse.Namespace) -> Any:
    """An instance of `model` from the flags that were given; the others keep their defaults.

    Raises:
        ConfigError: a value is outside its limits; names each.
    """
    given = {name: value for name in model.model_fields if (value := getattr(args, name, None)) is not None}
    try:
        return model(**given)
    except ValidationError as error:
        raise ConfigError(describe(error, tuple(model.model_fields))) from error


def add_model_flags(parser: Any, model: type[BaseModel], leave_out: Collection[str] = ()) -> None:
    """One `--flag` for each field of a pydantic model. A flag that was not given parses to None."""
    for name, info in model.model_fields.items():
        if name not in leave_out:
            flag, text = "--" + name.replace("_", "-"), help_text(name, info)
            parser.add_argument(flag, dest=name, default=None, help=text, **flag_options(info.annotation))


def flag_options(annotation: Any) -> dict[str, Any]:
    """argparse's options for a field's type: choices, a converter, a switch, a list, or JSON for what has parts."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        (inner,) = (kind for kind in get_args(annotation) if kind is not NoneType)
        return flag_options(inner)
    if origin is Literal:
        choices = get_args(annotation)
        return {"choices": choices, "type": type(choices[0])}
    if origin is list:
        (inner,) = get_args(annotation)
        return {"action": "append", **flag_options(inner)}
    if origin is dict:
        return {"type": json_object, "metavar": "JSON"}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {"type": partial(json_model, annotation), "metavar": "JSON"}
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    converter: Callable[[str], Any] = annotation
    return {"type": converter, "metavar": {int: "N", float: "X"}.get(annotation, "TEXT")}


def help_text(name: str, info: FieldInfo) -> str:
    """The field's description, the JSON of an example if it has one, and its default, with argparse's % escaped."""
    default = info.get_default(call_default_factory=True)
    example = "".join(f"; such as '{json.dumps(example)}'" for example in info.examples or ())
    suffix = "" if default in (None, [], {}, False) else f" (default: {default})"
    return f"{info.description or name}{example}{suffix}".replace("%", "%%")


def json_object(text: str) -> dict[str, Any]:
    """For argparse: a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error} (got {text!r})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object in braces (got {text!r})")
    return value


def json_model(model: type[BaseModel], text: str) -> BaseModel:
    """For argparse: a pydantic model from its fields as a JSON object."""
    try:
        return model.model_validate(json_object(text))
    except ValidationError as error:
        known = tuple(info.alias or name for name, info in model.model_fields.items())
        raise argparse.ArgumentTypeError(describe(error, known)) from error


def positive_int(text: str) -> int:
    """For argparse: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def positive_float(text: str) -> float:
    """For argparse: a number above 0, `inf` allowed."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value
