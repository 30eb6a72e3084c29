"""A value against a pydantic model, with unknown keys refused at every level, whatever the model itself ignores."""

from __future__ import annotations

from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from cluster.validate.problems import Problems
from cluster.validate.source import Path


def check_model(problems: Problems, path: Path, value: Any, model: type[BaseModel]) -> None:
    """Adds a problem for each unknown key at any depth, and for each value that the model does not take.

    Where the model accepts either a plain mapping or another model (as Ray does for autoscaling_config), the other
    model decides.
    """
    if not isinstance(value, dict):
        problems.add(path, f"must be a mapping, not {kind(value)}")
        return
    problems.check_keys(path, value, model.model_fields)
    for name, info in model.model_fields.items():
        inner = inner_model(info.annotation)
        if inner is None or name not in value:
            continue
        entries = value[name]
        if isinstance(entries, dict):
            check_model(problems, (*path, name), entries, inner)
        elif isinstance(entries, list):
            for index, entry in enumerate(entries):
                check_model(problems, (*path, name, index), entry, inner)
    try:
        model.model_validate({key: entry for key, entry in value.items() if key in model.model_fields})
    except ValidationError as error:
        for problem in error.errors():
            place = locate(path, value, problem["loc"])
            if problem["type"] == "extra_forbidden" or problems.at_or_below(place):
                continue  # reported by the walk above
            message = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "missing":
                problems.add((*place, problem["loc"][-1]), "is required here")
                continue
            if place == path or isinstance(problems.source.get(place), dict):
                place = mentioned(place, problems.source.get(place), message)
                problems.add(place, message)
            else:
                secret = "Secret" in str(getattr(model.model_fields.get(problem["loc"][0]), "annotation", ""))
                problems.add(place, message if secret else f"{message} (got {problem['input']!r})")
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # of validators that import what is named
        problems.add(mentioned(path, value, str(error)), f"{type(error).__name__}: {error}")


def locate(path: Path, value: Any, location: tuple[Any, ...]) -> Path:
    """Pydantic's location as a path: its names of union members are left out, since the data does not have them."""
    for part in location:
        is_key = isinstance(value, dict) and part in value
        if is_key or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            path, value = (*path, part), value[part]
    return path


def mentioned(path: Path, value: Any, message: str) -> Path:
    """The key of `value` that a message about the whole mapping is about, if it names one."""
    names = [key for key in value if isinstance(key, str) and key in message] if isinstance(value, dict) else []
    return (*path, min(names, key=message.find)) if names else path


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model inside `Optional[...]`, `Union[dict, ...]`, `list[...]`; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, Union) or type(annotation).__name__ == "UnionType":
        for each in get_args(annotation):
            if (model := inner_model(each)) is not None:
                return model
    return None


def kind(value: Any) -> str:
    """A value's type as YAML's readers call it."""
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true/false", type(None): "nothing"}
    return names.get(type(value), "a number")
