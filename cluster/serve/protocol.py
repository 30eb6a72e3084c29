"""The bodies of requests as pydantic models, after the OpenAI protocol. Answers are in `answers.py`.

Requests are strict: a wrong type is an error, an unknown field is an error, and a field that OpenAI (or vLLM) knows
but we do not support is an error that names it unless it holds its neutral value. Nothing is silently ignored.

Reference: https://platform.openai.com/docs/api-reference/chat and .../completions.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from cluster.serve.body import MAX_VALUES, AtMost, InvalidFieldError, StrictModel
from cluster.serve.generation_request import GenerationRequest
from cluster.serve.messages import JsonObject, Messages, NamedTool, Text, Tool, Tools
from scheduler.sampling_params import MAX_LOGPROBS

MAX_STREAMS = 1024  # prompts x n of one request
COMPLETION_DEFAULT_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


def _keep_messages(options: dict[str, Any]) -> dict[str, Any]:
    """`chat_template_kwargs` must not overrule the request itself."""
    taken = sorted({"messages", "add_generation_prompt", "tools"} & options.keys())
    if taken:
        raise ValueError(f"{', '.join(taken)} is a field of the request itself")
    return options


TokenIds = Annotated[list[int], AtMost()]
TemplateOptions = Annotated[JsonObject, AfterValidator(_keep_messages)]


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

    max_values: ClassVar[int | None] = MAX_VALUES

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    tools: Tools | None = None
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
    def must_call(self) -> bool:
        """Whether the answer has to be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def only_function(self) -> str | None:
        """The function that a required call is of; None if there are several to choose from."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.function.name
        return self.tools[0].function.name if len(self.tools) == 1 else None

    @model_validator(mode="after")
    def _check_format(self) -> ChatCompletionRequest:
        if self.output_format is not None and self.offered_tools:
            raise InvalidFieldError(
                "an answer of a given form cannot call tools: leave 'tools' out, or set 'tool_choice' to 'none'",
                self.output_format.field,
            )
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
        | Annotated[list[Text], AtMost(MAX_STREAMS), Tag("list[str]")]
        | Annotated[TokenIds, Tag("list[int]")]
        | Annotated[list[TokenIds], AtMost(MAX_STREAMS), Tag("list[list[int]]")],
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


class _TextRequest(StrictModel):
    model: Text | None = None


class TokenizeRequest(_TextRequest):
    """Body of POST /tokenize: `prompt`, or `messages` and how the chat template is to render them.

    `add_special_tokens` is by default true for a prompt; a chat template writes its own.
    """

    max_values: ClassVar[int | None] = MAX_VALUES

    prompt: Text | None = None
    messages: Messages | None = None
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

    tokens: TokenIds
    skip_special_tokens: bool = False
