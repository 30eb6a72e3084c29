"""The form of an answer: `response_format`, and the grammars of required tool calls and of answers after reasoning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from cluster.errors import InvalidRequestError
from cluster.grammar import short
from cluster.grammar_compiler import grammar_text, quoted
from cluster.serve.body import StrictModel
from cluster.serve.messages import JsonObject, Text, Tool
from cluster.serve.parsers import ToolParser
from scheduler.structured_outputs import StructuredOutputs

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_REASONING = """
start: {begin} BLANK? answer
thoughts[suffix="</think>"]: /(.|\\n)*/
BLANK: /[ \\t\\r\\n]{{1,8}}/
answer: @answer
"""


class OutputFormat(StructuredOutputs):
    """What an output must follow, on behalf of the request's field `source`."""

    source: str

    @property
    def field(self) -> str:
        return self.source

    @classmethod
    def of(cls, source: str, **given: Any) -> OutputFormat:
        """Raises InvalidRequestError, for `source`, if it is too large."""
        try:
            return cls(source=source, **given)
        except ValidationError as error:
            raise InvalidRequestError(
                f"{source}: {error.errors()[0]['msg'].removeprefix('Value error, ')}", source
            ) from error


class _Format(StrictModel):
    @property
    def output(self) -> OutputFormat | None:
        """What the output must follow; None: nothing."""
        return None


class TextFormat(_Format):
    type: Literal["text"]


class JsonObjectFormat(_Format):
    type: Literal["json_object"]

    @property
    def output(self) -> OutputFormat | None:
        return OutputFormat.of("response_format", json_object=True)


class NamedSchema(_Format):
    """`strict` changes nothing: a schema is always kept."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(_Format):
    type: Literal["json_schema"]
    json_schema: NamedSchema

    @property
    def output(self) -> OutputFormat | None:
        return OutputFormat.of("response_format", json=self.json_schema.schema_)


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def after_reasoning(form: StructuredOutputs, opened: bool) -> OutputFormat:
    """`form` for an answer that may begin with reasoning; `opened`: it does, since the prompt began it.

    Raises:
        InvalidRequestError: a grammar that cannot be read, or too large.
    """
    begin = "thoughts" if opened else '("<think>" thoughts)?'
    return _joined(form.field, _REASONING.format(begin=begin), [_named(form, "answer")])


def tool_calls(tools: Sequence[Tool], parser: type[ToolParser], name: str | None, several: bool) -> OutputFormat:
    """Calls in `parser`'s format whose arguments keep their tools' schemas.

    Args:
        name: the function of the first call; None: any of `tools`.
        several: further calls may follow.

    The text begins where `parser.prefix(name)` ends.

    Raises:
        InvalidRequestError: a schema that cannot be read, or too large.
    """
    grammars, calls, first = [], [], "call"
    for i, function in enumerate(tool.function for tool in tools):
        schema = _NO_ARGUMENTS if function.parameters is None else function.parameters
        grammars.append(_named(OutputFormat.of("tools", json=schema), f"arguments_{i}"))
        arguments = f'" "? @arguments_{i} "}}"'
        calls.append(quoted(parser.prefix(function.name)[len(parser.prefix(None)) :]) + " " + arguments)
        if function.name == name:
            first = arguments
    start = first
    if several:
        start += f" ({quoted(parser.BETWEEN_CALLS + parser.prefix(None))} call)*"
        start += f" {quoted(parser.AFTER_CALL)}?" if parser.AFTER_CALL else ""
    return _joined("tools", f"start: {start}\ncall: {' | '.join(calls)}\n", grammars)


def _named(form: StructuredOutputs, name: str) -> dict[str, Any]:
    """`form` as a grammar of llguidance's that others know as `@name`. Raises InvalidRequestError."""
    try:
        [grammar] = json.loads(grammar_text(form))["grammars"]
        return grammar | {"name": name}
    except RecursionError as error:
        raise InvalidRequestError(f"{form.field}: it is nested too deeply", form.field) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(f"{form.field}: {short(str(error))}", form.field) from error


def _joined(source: str, top: str, grammars: list[dict[str, Any]]) -> OutputFormat:
    """A Lark grammar that names others as `@name`."""
    try:
        text = json.dumps({"grammars": [{"name": "top", "lark_grammar": top}, *grammars]})
    except RecursionError as error:  # what could just be read is one level too many to be written
        raise InvalidRequestError(f"{source}: it is nested too deeply", source) from error
    return OutputFormat.of(source, grammar=text)
