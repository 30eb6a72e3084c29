"""The OpenAI protocol as pydantic models: requests. Answers are in `answers.py`.

Requests are strict: a wrong type is an error, an unknown field is an error, and a field that OpenAI (or vLLM) knows
but we do not support is an error that names it unless it holds its neutral value. Nothing is silently ignored.
Limits of the sampling parameters live in `SamplingParams` alone.

Reference: https://platform.openai.com/docs/api-reference/chat and .../completions.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cluster.errors import InvalidRequestError
from cluster.serve.errors import ContextLengthError
from scheduler.sampling_params import SamplingParams

MAX_CHOICES = 128
MAX_STREAMS = 1024  # prompts x n of one request
COMPLETION_DEFAULT_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

_SAMPLING_FIELDS = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)


def _check_unicode(text: str) -> str:
    """JSON can smuggle in half of a surrogate pair, which no tokenizer and no answer can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode: a lone surrogate at character {error.start}") from error
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]


class StreamOptions(BaseModel):
    """`stream_options`: one last chunk with `usage` when `include_usage` is set."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """Fields that chat and text completions share."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    # Known to OpenAI or vLLM clients, not supported: allowed only with a value that changes nothing.
    neutral_only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "best_of": (1,),
        "echo": (False,),
        "frequency_penalty": (0,),
        "include_stop_str_in_output": (False,),
        "logit_bias": ({},),
        "logprobs": (False,),
        "metadata": ({},),
        "presence_penalty": (0,),
        "priority": (0,),
        "prompt_logprobs": (0,),
        "repetition_penalty": (1,),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
    }

    model: Text | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: Text | list[Text] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Any) -> Any:
        """Drop known unsupported fields that hold a neutral value; refuse them by name otherwise."""
        if not isinstance(values, dict):
            return values
        for name in values.keys() & cls.neutral_only.keys():
            value = values[name]
            if value is not None and not any(_same(value, neutral) for neutral in cls.neutral_only[name]):
                raise InvalidFieldError(f"'{name}' is not supported by this server; leave it out", name)
        return {name: value for name, value in values.items() if name not in cls.neutral_only}

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidFieldError("'stream_options' needs 'stream': true", "stream_options")
        return self

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """Name of the field that limits the output, and its value."""
        return "max_tokens", self.max_tokens

    def sampling(self, seed: int, room: int, default_max_tokens: int | None = None) -> SamplingParams:
        """The sampling parameters of choice 0.

        Args:
            seed: used when the request gives none; unsigned 64-bit.
            room: tokens left in the context after the prompt: the default for the output length.
            default_max_tokens: a smaller default where the endpoint has one.

        Raises:
            InvalidRequestError: a value outside its limits, or an output that cannot fit; names the field.
        """
        limit_field, limit = self.token_limit
        if limit is None:
            limit = room if default_max_tokens is None else min(room, default_max_tokens)
        elif limit > room:
            raise ContextLengthError(
                f"{limit_field} is {limit}, but the model's context has room for {max(room, 0)} tokens after the "
                f"prompt; shorten the prompt or lower {limit_field}",
                limit_field,
            )
        values = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        given = {name: value for name, value in values.items() if value is not None}
        seed = (self.seed if self.seed is not None else seed) & ((1 << 64) - 1)
        try:
            return SamplingParams(max_tokens=limit, seed=seed, **given)
        except ValidationError as error:
            problem = error.errors()[0]
            name = str(problem["loc"][0]) if problem["loc"] else None
            name = limit_field if name == "max_tokens" else name
            message = problem["msg"].removeprefix("Value error, ")
            raise InvalidRequestError(f"{name}: {message}" if name else message, name) from error


class InvalidFieldError(ValueError):
    """A validator's error that knows its field, so that the answer's `param` can name it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def _same(value: Any, neutral: Any) -> bool:
    """Equal, without 0 == False and 1 == True."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


class TextPart(BaseModel):
    """One part of a message's content. Only text is served."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    """One message; `content` is a string or text parts."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates expect it: plain text, and `developer` under its older name."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return message if self.name is None else message | {"name": self.name}


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    neutral_only: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.neutral_only | {
        "audio": (),
        "chat_template": (),
        "continue_final_message": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "reasoning_effort": (),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "web_search_options": (),
    }

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _keep_messages(cls, options: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = sorted({"messages", "add_generation_prompt"} & (options or {}).keys())
        if taken:
            raise ValueError(f"{', '.join(taken)} is a field of the request itself")
        _check_unicode(json.dumps(options, ensure_ascii=False))
        return options

    @model_validator(mode="after")
    def _one_limit(self) -> ChatCompletionRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidFieldError("give max_tokens or max_completion_tokens, not two different values", "max_tokens")
        return self

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().token_limit


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions. `prompt`: text, token ids, or a list of either."""

    neutral_only: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.neutral_only | {
        "logprobs": (),
        "suffix": ("",),
    }

    prompt: Text | list[Text] | list[int] | list[list[int]]

    @field_validator("prompt")
    @classmethod
    def _not_empty(cls, prompt: str | list) -> str | list:
        if len(prompt) == 0 or (isinstance(prompt[0], str | list) and not all(prompt)):
            raise ValueError("the prompt is empty; give at least one token of text")
        return prompt

    @model_validator(mode="after")
    def _limit_choices(self) -> CompletionRequest:
        total = len(self.prompts) * self.choices
        if total > MAX_STREAMS:
            raise InvalidFieldError(f"{total} choices (prompts x n) in one request; the limit is {MAX_STREAMS}", "n")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt
