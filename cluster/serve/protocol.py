"""The OpenAI protocol as pydantic models: requests. Answers are in `answers.py`.

Requests are strict: a wrong type is an error, an unknown field is an error, and a field that OpenAI (or vLLM) knows
but we do not support is an error that names it unless it holds its neutral value. Nothing is silently ignored.
Limits of the sampling parameters live in `SamplingParams` alone.

Reference: https://platform.openai.com/docs/api-reference/chat and .../completions.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from cluster.errors import InvalidRequestError
from cluster.serve.errors import ContextLengthError
from cluster.serve.messages import (
    MAX_TOOLS,
    ChatMessage,
    InvalidFieldError,
    JsonObject,
    NamedTool,
    Text,
    Tool,
)
from scheduler.sampling_params import MAX_LOGPROBS, SamplingParams

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
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)


def _keep_messages(options: dict[str, Any]) -> dict[str, Any]:
    """`chat_template_kwargs` must not overrule the request itself."""
    taken = sorted({"messages", "add_generation_prompt", "tools"} & options.keys())
    if taken:
        raise ValueError(f"{', '.join(taken)} is a field of the request itself")
    return options


TemplateOptions = Annotated[JsonObject, AfterValidator(_keep_messages)]


class StreamOptions(BaseModel):
    """`stream_options`: one last chunk with `usage` when `include_usage` is set; `continuous_usage_stats` adds the
    counts so far to every chunk."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(BaseModel):
    """Fields that chat and text completions share.

    Beside OpenAI's and vLLM's: `priority`, where larger goes first, and `timeout`, seconds from arrival to the last
    token.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    # Known to OpenAI or vLLM clients, not supported: allowed only with a value that changes nothing.
    neutral_only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "best_of": (1,),
        "metadata": ({},),
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
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: bool | None = None
    user: Text | None = None
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31)
    timeout: float | None = Field(None, gt=0)

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
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidFieldError("'prompt_logprobs' are not in a stream; leave out 'stream'", "prompt_logprobs")
        if self.stream_options is not None and self.continuous_usage and not self.with_usage:
            raise InvalidFieldError("'continuous_usage_stats' needs 'include_usage': true", "stream_options")
        return self

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def scores(self) -> dict[str, int | None]:
        """The log probabilities that the engine is to compute, as `SamplingParams` names them."""
        return {"prompt_logprobs": self.prompt_logprobs}

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
        values = {name: getattr(self, name) for name in _SAMPLING_FIELDS} | self.scores
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


def _same(value: Any, neutral: Any) -> bool:
    """Equal, without 0 == False and 1 == True."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    neutral_only: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.neutral_only | {
        "audio": (),
        "chat_template": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "reasoning_effort": (),
        "web_search_options": (),
    }

    messages: list[ChatMessage] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidFieldError("'top_logprobs' needs 'logprobs': true", "top_logprobs")
        return self

    @property
    def scores(self) -> dict[str, int | None]:
        return super().scores | {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}

    @model_validator(mode="after")
    def _check_tools(self) -> ChatCompletionRequest:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise InvalidFieldError("two functions have the same name", "tools")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise InvalidFieldError(f"there is no function '{choice.function.name}' in 'tools'", "tool_choice")
        if choice == "required" and not names:
            raise InvalidFieldError("'required' needs 'tools'", "tool_choice")
        if self.offered_tools and self.continue_final_message:
            raise InvalidFieldError("a message that is continued cannot call tools", "continue_final_message")
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model hears of."""
        return [] if self.tool_choice == "none" else self.tools or []

    @model_validator(mode="after")
    def _check_continuation(self) -> ChatCompletionRequest:
        check_continuation(self)
        return self

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


def check_continuation(request: ChatCompletionRequest | TokenizeRequest) -> None:
    """Raises InvalidFieldError if the final message cannot be continued."""
    if not request.continue_final_message:
        return
    last = request.messages[-1]
    if last.role != "assistant" or last.tool_calls:
        raise InvalidFieldError("the last message must be the assistant's, with text only", "continue_final_message")
    if request.add_generation_prompt:
        raise InvalidFieldError(
            "'add_generation_prompt' begins a new message, 'continue_final_message' goes on with the last: give one",
            "add_generation_prompt",
        )


def _kind_of_prompt(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return "str"
    first = prompt[0] if prompt else None
    return "list[str]" if isinstance(first, str) else "list[list[int]]" if isinstance(first, list) else "list[int]"


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions. `prompt`: text, token ids, or a list of either."""

    neutral_only: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.neutral_only | {
        "suffix": ("",),
    }

    prompt: Annotated[
        Annotated[Text, Tag("str")]
        | Annotated[list[Text], Tag("list[str]")]
        | Annotated[list[int], Tag("list[int]")]
        | Annotated[list[list[int]], Tag("list[list[int]]")],
        Discriminator(_kind_of_prompt),  # trying each in turn takes long on a long list
    ]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

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
    def scores(self) -> dict[str, int | None]:
        """With `echo` the prompt's tokens have log probabilities as well."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return {
            "logprobs": self.logprobs,
            "prompt_logprobs": max((top for top in wanted if top is not None), default=None),
        }

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class _TextRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: Text | None = None


class TokenizeRequest(_TextRequest):
    """Body of POST /tokenize: `prompt`, or `messages` and how the chat template is to render them.

    `add_special_tokens` is by default true for a prompt; a chat template writes its own.
    """

    prompt: Text | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidFieldError("give 'prompt' or 'messages', one of them", "prompt")
        if self.prompt is not None:
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
                if getattr(self, name) is not None:
                    raise InvalidFieldError(f"'{name}' goes with 'messages', not with 'prompt'", name)
        else:
            check_continuation(self)
        return self


class DetokenizeRequest(_TextRequest):
    """Body of POST /detokenize."""

    tokens: list[int]
    skip_special_tokens: bool = False
