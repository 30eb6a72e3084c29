"""Chat messages as clients send them, and tools.

Reference: https://platform.openai.com/docs/api-reference/chat/create.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_TOOLS = 128
MAX_DEPTH = 64
"""Of a JSON value that a request brings: what renders or compiles it does so by recursion."""


class InvalidFieldError(ValueError):
    """A validator's error that knows its field, so that the answer's `param` can name it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def check_unicode(text: str) -> str:
    """JSON can smuggle in half of a surrogate pair, which no tokenizer and no answer can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode: a lone surrogate at character {error.start}") from error
    return text


def check_json(value: Any) -> Any:
    """The same for all strings in a JSON value, which may be `MAX_DEPTH` deep."""
    level, depth = [value], 0
    while level := [child for node in level if isinstance(node, dict | list) for child in _children(node)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    check_unicode(json.dumps(value, ensure_ascii=False))
    return value


def _children(node: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node


Text = Annotated[str, AfterValidator(check_unicode)]
JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(_Strict):
    """One part of a message's content. Only text is served."""

    type: Literal["text"]
    text: Text


class CalledFunction(_Strict):
    """What an assistant's message called; `arguments` is a JSON object as a string."""

    name: Text
    arguments: Text

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, arguments: str) -> str:
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not valid JSON: {error}") from error
        check_json(value)
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object, as a string")
        return arguments


class ToolCall(_Strict):
    """One call in an assistant's message."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Templates want the arguments as an object."""
        arguments = json.loads(self.function.arguments or "{}")
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


class ChatMessage(_Strict):
    """One message; `content` is a string or text parts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: Text | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    refusal: Text | None = None

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        for field, role in (
            ("tool_calls", "assistant"),
            ("reasoning_content", "assistant"),
            ("refusal", "assistant"),
            ("tool_call_id", "tool"),
        ):
            if getattr(self, field) is not None and self.role != role:
                raise InvalidFieldError(f"only messages of role '{role}' have it", field)
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise InvalidFieldError("Field required", "content")
        return self

    @property
    def text(self) -> str:
        """The content as plain text."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or self.refusal or ""

    @property
    def size(self) -> int:
        """Characters, about."""
        return len(self.text)

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: plain text, and `developer` under its older name."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        for field in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, field) is not None:
                message[field] = getattr(self, field)
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class FunctionTool(_Strict):
    """A function the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(_Strict):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionTool

    def for_template(self) -> dict[str, Any]:
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}} | function}


class NamedFunction(_Strict):
    name: str


class NamedTool(_Strict):
    """`tool_choice` that names the function to call."""

    type: Literal["function"]
    function: NamedFunction
