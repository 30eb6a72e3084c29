"""What a user asks of one request's sampling and length, validated."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from scheduler.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
"""Largest `logprobs` and `prompt_logprobs`: alternatives to a token that are reported with it."""
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
"""Most entries of a `logit_bias`."""
MAX_STOPS = 256
"""Most `stop` strings, and most `stop_token_ids`: every step looks at each of them."""
MAX_STOP_LENGTH = 1024
"""Most characters of a `stop` string."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3
"""Smaller ones than the least act as the least, so that logits stay finite."""


class SamplingParams(BaseModel):
    """Sampling and stopping of one request. Immutable; unknown names and out-of-range values raise
    `pydantic.ValidationError`.

    `max_tokens` and `seed` may be None up to the engine's ingress, which fixes both: the scheduler wants numbers.
    `stop` strings are matched on text, outside the scheduler. Log probabilities are those of the model's own
    distribution: before bias, penalties, temperature and filters. The logit that is sampled from gets, in this order,
    bias, repetition penalty, frequency and presence penalty, temperature, top-k, top-p, min-p.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    temperature: float = Field(1.0, ge=0, le=1e6, allow_inf_nan=False, description="0: greedy, the lowest id wins ties")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the likeliest tokens up to this mass; 1: off")
    top_k: int = Field(0, ge=-1, lt=2**31, description="keep this many likeliest tokens; 0 or -1: off")
    min_p: float = Field(0.0, ge=0, le=1, description="keep tokens at least this likely next to the best; 0: off")
    max_tokens: int | None = Field(
        None, ge=0, lt=2**31, description="exact limit of the output; None: up to max_seq_len"
    )
    min_tokens: int = Field(
        0, ge=0, lt=2**31, description="no stop token or stop string before this many generated tokens"
    )
    seed: int | None = Field(None, ge=0, lt=2**64, description="None: chosen at the ingress")
    ignore_eos: bool = Field(False, description="generate on after the model's end-of-sequence tokens")
    stop: list[str] = Field(default_factory=list, description="strings that end the text; one string is accepted")
    stop_token_ids: list[int] = Field(default_factory=list, description="token ids that end the request, beside EOS")
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, allow_inf_nan=False, description="off the logit of every token that was generated before"
    )
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, allow_inf_nan=False, description="off a token's logit each time that it was generated before"
    )
    repetition_penalty: float = Field(
        1.0, gt=0, le=MAX_REPETITION_PENALTY, allow_inf_nan=False,
        description="divides positive and multiplies negative logits of tokens in the prompt or generated; 1: off",
    )  # fmt: skip
    logit_bias: dict[int, float] = Field(
        default_factory=dict, examples=[{"50": -100}],
        description="token id -> what is added to its logit, -100..100; string keys are accepted",
    )  # fmt: skip
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="log probabilities of each generated token and of so many likeliest"
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="the same of each prompt token but the first; finds no cached prefix"
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, examples=[{"regex": "[0-9]+"}],
        description="the form that the output must have, as one of json, json_object, regex, choice, grammar",
    )  # fmt: skip

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_list(cls, value: Any) -> Any:
        if value is None:
            return []
        return [value] if isinstance(value, str) else _tuple_as_list(value)

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _ids_as_list(cls, value: Any) -> Any:
        return [] if value is None else _tuple_as_list(value)

    @field_validator("stop")
    @classmethod
    def _stops_in_limits(cls, value: list[str]) -> list[str]:
        if len(value) > MAX_STOPS:
            raise ValueError(f"{len(value)} stop strings, at most {MAX_STOPS} are allowed")
        if "" in value:
            raise ValueError("a stop string must not be empty")
        longest = max(map(len, value), default=0)
        if longest > MAX_STOP_LENGTH:
            raise ValueError(f"a stop string has {longest} characters, at most {MAX_STOP_LENGTH} are allowed")
        return value

    @field_validator("stop_token_ids")
    @classmethod
    def _ids_in_range(cls, value: list[int]) -> list[int]:
        if len(value) > MAX_STOPS:
            raise ValueError(f"{len(value)} stop_token_ids, at most {MAX_STOPS} are allowed")
        if any(not 0 <= token < 2**31 for token in value):
            raise ValueError("stop_token_ids must be token ids, 0 or larger")
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _ids_of_bias(cls, value: Any) -> Any:
        """JSON has string keys only."""
        if value is None:
            return {}
        if not isinstance(value, dict):
            return value
        digits = {key: int(key) for key in value if isinstance(key, str) and key.isascii() and key.isdigit()}
        return {digits.get(key, key) if isinstance(key, str) else key: bias for key, bias in value.items()}

    @field_validator("logit_bias")
    @classmethod
    def _bias_in_range(cls, value: dict[int, float]) -> dict[int, float]:
        if len(value) > MAX_BIASED_TOKENS:
            raise ValueError(f"logit_bias names {len(value)} tokens, at most {MAX_BIASED_TOKENS} are allowed")
        for token, bias in value.items():
            if not 0 <= token < 2**31:
                raise ValueError(f"logit_bias names token id {token}; ids lie in 0..2^31-1")
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:  # false for nan as well
                raise ValueError(f"logit_bias of token {token} is {bias}; it must lie in -100..100")
        return value

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} must not exceed max_tokens {self.max_tokens}")
        return self

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on which tokens came before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


def _tuple_as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
