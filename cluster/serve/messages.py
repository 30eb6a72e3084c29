"""Chat messages as clients send them, and tools.

Reference: https://platform.openai.com/docs/api-reference/chat/create.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from cluster.serve.body import MAX_VALUES, AtMost, InvalidFieldError, StrictModel
from scheduler.json_bounds import check_values

MAX_MESSAGES = 4096
MAX_TOOLS = 128
FRAME = 8
"""Characters that a template puts around a message, at least."""
MAX_ARGUMENTS = 1 << 18
"""JSON values in the arguments of a chat's calls, as far as they can be counted without reading them."""
MAX_DEPTH = 64
"""Of a JSON value that a request brings: what renders or compiles it does so by recursion."""


def check_unicode(text: str) -> str:
    """JSON can smuggle in half of a surrogate pair, which no tokenizer and no answer can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode: a lone surrogate at character {error.start}") from error
    return text


def check_json(value: Any) -> Any:
    """The same for all strings in a JSON value, which may be `MAX_DEPTH` deep and hold `MAX_VALUES` values."""
    check_values(value, MAX_VALUES, MAX_DEPTH)
    check_unicode(json.dumps(value, ensure_ascii=False))
    return value


Text = Annotated[str, AfterValidator(check_unicode)]
JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]


class TextPart(StrictModel):
    """One part of a message's content. Only text is served."""

    type: Literal["text"]
    text: Text


class CalledFunction(StrictModel):
    """What an assistant's message called; `arguments` is a JSON object as a string."""

    name: Text
    arguments: Text

    def check(self) -> None:
        """Raises ValueError unless the arguments are an object."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not valid JSON: {error}") from error
        check_json(value)
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object, as a string")


class ToolCall(StrictModel):
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


class ChatMessage(StrictModel):
    """One message; `content` is a string or text parts."""

    # as in the assistant's messages that OpenAI's client has read, and sends back
    neutral_only: ClassVar[dict[str, tuple[Any, ...]]] = {"annotations": ([],), "audio": (), "function_call": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], AtMost()] | None = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], AtMost()] | None = None
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
        """Characters that a template may make of it, about."""
        texts = [self.text, self.name, self.tool_call_id, self.reasoning_content]
        for call in self.tool_calls or ():
            texts += [call.id, call.function.name, call.function.arguments]
        return FRAME + sum(len(text) for text in texts if text)

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


def check_calls(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Raises InvalidFieldError for a call whose arguments are no object, or calls with more of them than is read."""
    functions = {
        f"{i}.tool_calls.{j}.function.arguments": call.function
        for i, message in enumerate(messages)
        for j, call in enumerate(message.tool_calls or ())
    }
    most = sum(function.arguments.count(each) for function in functions.values() for each in "[{,")
    if most > MAX_ARGUMENTS:
        raise ValueError(
            f"the arguments of the calls in it have {most} of the characters '[', '{{' and ',' together; "
            f"at most {MAX_ARGUMENTS} are read"
        )
    for name, function in functions.items():
        try:
            function.check()
        except ValueError as error:
            raise InvalidFieldError(str(error), name) from error
    return messages


Messages = Annotated[list[ChatMessage], Field(min_length=1), AtMost(MAX_MESSAGES), AfterValidator(check_calls)]


class FunctionTool(StrictModel):
    """A function the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionTool

    def for_template(self) -> dict[str, Any]:
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}} | function}


Tools = Annotated[list[Tool], AtMost(MAX_TOOLS)]


class NamedFunction(StrictModel):
    name: str


class NamedTool(StrictModel):
    """`tool_choice` that names the function to call."""

    type: Literal["function"]
    function: NamedFunction
