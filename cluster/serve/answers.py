"""The OpenAI protocol as pydantic models: answers without `stream`, and ids. Requests are in `protocol.py`."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, SkipValidation, model_serializer


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """What every error is answered with, see `errors.Problem`."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class Usage(BaseModel):
    """Token counts of one request; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def count(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        )


class FunctionCall(BaseModel):
    name: str
    arguments: str


class MessageToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


# As `LogprobWriter` makes them; to read them again would take long.
PromptLogprobs = Annotated[list[dict[str, Any] | None], SkipValidation]


class Sparse(BaseModel):
    """Leaves out the fields named `optional` where they are None."""

    optional: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values = handler(self)
        return {name: value for name, value in values.items() if value is not None or name not in self.optional}


class AssistantMessage(Sparse):
    """`content` is None when there are only tool calls."""

    optional = ("reasoning_content", "tool_calls")

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: str


class CompletionChoice(Sparse):
    optional = ("prompt_logprobs",)

    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str
    prompt_logprobs: PromptLogprobs | None = None


class _Answer(Sparse):
    model_config = ConfigDict(protected_namespaces=())

    id: str
    object: str
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    usage: Usage


class ChatCompletion(_Answer):
    """Answer of POST /v1/chat/completions without `stream`."""

    optional = ("prompt_logprobs",)

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None


class Completion(_Answer):
    """Answer of POST /v1/completions without `stream`."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "raydix"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(BaseModel):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """Answer of POST /detokenize."""

    prompt: str


def new_id(prefix: str) -> str:
    """An id as OpenAI writes them: `chatcmpl-...`, `cmpl-...`."""
    return f"{prefix}-{uuid.uuid4().hex}"
