"""`StructuredOutputs`: what form an output must have. What it means is a compiler's matter, outside of this package."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from scheduler.json_bounds import check_values

MAX_SPEC_BYTES = 1 << 18
"""Longest JSON schema, regex, list of choices or grammar: to compile one of this size takes seconds."""
MAX_CHOICES = 4096
MAX_DEPTH = 64
"""Levels of a JSON schema: what pickles or compiles it does so by recursion."""

_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


class StructuredOutputs(BaseModel):
    """One of these, under vLLM's names. Immutable; a wrong value raises `pydantic.ValidationError`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    json_schema: dict[str, Any] | str | None = Field(
        None, alias="json", description="a JSON schema, as an object or as text"
    )
    json_object: bool | None = Field(None, description="true: any JSON object")
    regex: str | None = Field(None, description="a regular expression for the whole output")
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES, description="one of these texts")
    grammar: str | None = Field(None, min_length=1, description="a context-free grammar in Lark's or GBNF's syntax")

    @field_validator("json_schema")
    @classmethod
    def _as_object(cls, value: dict[str, Any] | str | None) -> dict[str, Any] | None:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"not valid JSON: {error}") from error
            if not isinstance(value, dict):
                raise ValueError("a JSON schema must be an object")
        try:
            check_values(value, most_levels=MAX_DEPTH)
        except ValueError as error:
            raise ValueError(f"{error}; take parts out of it with $defs and $ref") from error
        return value

    @field_validator("json_object")
    @classmethod
    def _only_true(cls, value: bool | None) -> bool | None:
        if value is False:
            raise ValueError("must be true; leave it out otherwise")
        return value

    @field_validator("choice")
    @classmethod
    def _no_empty_choice(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and "" in value:
            raise ValueError("a choice must not be empty")
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> StructuredOutputs:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            names = ", ".join("json" if kind == "json_schema" else kind for kind in _KINDS)
            raise ValueError(f"give one of {names}, not {len(given)} of them")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise ValueError("not valid Unicode: it has a lone surrogate") from error
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if size > MAX_SPEC_BYTES:
            raise ValueError(f"it has {size} bytes, at most {MAX_SPEC_BYTES} are allowed")
        return self

    @property
    def kind(self) -> str:
        """The name of the one that is given."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    @property
    def text(self) -> str:
        """What is given, as text."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    @property
    def field(self) -> str:
        """What an error about it blames."""
        return "structured_outputs"
