"""What every JSON object in a request's body has in common: strict types, and bounds that are checked first.

Pydantic goes on after a mistake and FastAPI describes each one, on the event loop and with the GIL: a body of 10 MB
with a wrong value in each place of a list would stop all streams for most of a minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from scheduler.json_bounds import check_values

MAX_FIELDS = 256
"""Of one JSON object whose fields are known by name."""
MAX_VALUES = 1 << 16
"""JSON values in a chat, its messages and tools: what checks and renders them visits each."""


class InvalidFieldError(ValueError):
    """A validator's error that knows its field, so that the answer's `param` can name it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class AtMost:
    """Annotates a list or a dictionary: no more than `limit` entries, of which nothing is read if there are more. A
    list's first mistake ends its validation. None: no limit.

    Not pydantic's `FailFast`, which cannot be hashed and so not be in a union, nor its `max_length`, which counts the
    valid entries.
    """

    limit: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        if schema["type"] == "list":
            schema["fail_fast"] = True
        return core_schema.no_info_before_validator_function(self._check, schema)

    def _check(self, value: Any) -> Any:
        if self.limit is not None and isinstance(value, list | dict) and len(value) > self.limit:
            raise ValueError(f"it has {len(value)} entries, at most {self.limit} are allowed")
        return value


class StrictModel(BaseModel):
    """A JSON object whose fields are known: a wrong type is an error, and so is a field of another name."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    # Known to OpenAI or vLLM clients, not supported: allowed only with a value that changes nothing.
    neutral_only: ClassVar[dict[str, tuple[Any, ...]]] = {}
    # Of the JSON values in it, on all levels together; None: no limit.
    max_values: ClassVar[int | None] = None

    @model_validator(mode="before")
    @classmethod
    def _before_fields(cls, values: Any) -> Any:
        """Refuse what is too large. Drop known unsupported fields that hold a neutral value; refuse them by name
        otherwise."""
        if not isinstance(values, dict):
            return values
        if len(values) > MAX_FIELDS:
            raise ValueError(f"an object with {len(values)} fields; at most {MAX_FIELDS} are read")
        if cls.max_values is not None:
            check_values(values, cls.max_values)
        unsupported = values.keys() & cls.neutral_only.keys()
        for name in unsupported:
            value = values[name]
            if value is not None and not any(_same(value, neutral) for neutral in cls.neutral_only[name]):
                raise InvalidFieldError(f"'{name}' is not supported by this server; leave it out", name)
        return {name: value for name, value in values.items() if name not in unsupported} if unsupported else values


def _same(value: Any, neutral: Any) -> bool:
    """Equal, without 0 == False and 1 == True."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
