"""What chat and text completions have in common: their shared fields, and the sampling parameters that follow.

Limits of the sampling parameters live in `SamplingParams` alone.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from cluster.errors import InvalidRequestError
from cluster.serve.body import MAX_FIELDS, AtMost, InvalidFieldError, StrictModel
from cluster.serve.errors import ContextLengthError
from cluster.serve.messages import Text, check_unicode
from cluster.serve.output_format import ResponseFormat
from scheduler.sampling_params import MAX_BIASED_TOKENS, MAX_LOGPROBS, MAX_STOPS, SamplingParams
from scheduler.structured_outputs import StructuredOutputs

MAX_CHOICES = 128
MAX_USER = 256
"""Characters of `user`: each choice carries it, and the policy `fair_share` keeps it."""

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


class StreamOptions(StrictModel):
    """`stream_options`: one last chunk with `usage` when `include_usage` is set; `continuous_usage_stats` adds the
    counts so far to every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(StrictModel):
    """Fields that chat and text completions share.

    Beside OpenAI's and vLLM's: `priority`, where larger goes first, and `timeout`, seconds from arrival to the last
    token.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    neutral_only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "best_of": (1,),
        "metadata": ({},),
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
    stop: Text | Annotated[list[Text], AtMost(MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], AtMost(MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], AtMost(MAX_BIASED_TOKENS)] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[StructuredOutputs, AtMost(MAX_FIELDS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: bool | None = None
    user: Annotated[str, Field(max_length=MAX_USER), AfterValidator(check_unicode)] | None = None
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31)
    timeout: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidFieldError("'stream_options' needs 'stream': true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidFieldError("'prompt_logprobs' are not in a stream; leave out 'stream'", "prompt_logprobs")
        if self.stream_options is not None and self.continuous_usage and not self.with_usage:
            raise InvalidFieldError("'continuous_usage_stats' needs 'include_usage': true", "stream_options")
        return self

    @model_validator(mode="after")
    def _one_format(self) -> GenerationRequest:
        if self.structured_outputs is not None and self.output_format is not self.structured_outputs:
            raise InvalidFieldError("give 'response_format' or 'structured_outputs', one of them", "response_format")
        return self

    @property
    def output_format(self) -> StructuredOutputs | None:
        """The form that the answer must have; None: any."""
        if self.response_format is not None and self.response_format.output is not None:
            return self.response_format.output
        return self.structured_outputs

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

    def sampling(
        self, seed: int, room: int, default_max_tokens: int | None = None, form: StructuredOutputs | None = None
    ) -> SamplingParams:
        """The sampling parameters of choice 0.

        Args:
            seed: used when the request gives none; unsigned 64-bit.
            room: tokens left in the context after the prompt: the default for the output length.
            default_max_tokens: a smaller default where the endpoint has one.
            form: what the output must follow.

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
        if (self.min_tokens or 0) > limit >= 0:
            unless = "" if self.token_limit[1] is not None else " where it is not given"
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, but {limit_field} is {limit}{unless}; lower min_tokens or give a "
                f"larger {limit_field}",
                "min_tokens",
            )
        values = {name: getattr(self, name) for name in _SAMPLING_FIELDS} | self.scores
        given = {name: value for name, value in values.items() if value is not None}
        seed = (self.seed if self.seed is not None else seed) & ((1 << 64) - 1)
        try:
            return SamplingParams(max_tokens=limit, seed=seed, structured_outputs=form, **given)
        except ValidationError as error:
            problem = error.errors()[0]
            name = str(problem["loc"][0]) if problem["loc"] else None
            name = limit_field if name == "max_tokens" else name
            message = problem["msg"].removeprefix("Value error, ")
            raise InvalidRequestError(f"{name}: {message}" if name else message, name) from error
