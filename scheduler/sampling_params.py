"""What a user asks of one request's sampling and length, validated."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class SamplingParams(BaseModel):
    """Sampling and stopping of one request. Immutable; unknown names and out-of-range values raise
    `pydantic.ValidationError`.

    `max_tokens` and `seed` may be None up to the engine's ingress, which fixes both: the scheduler wants numbers.
    `stop` strings are matched on text, outside the scheduler.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    temperature: float = Field(1.0, ge=0, le=1e6, allow_inf_nan=False, description="0: greedy, the lowest id wins ties")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the likeliest tokens up to this mass; 1: off")
    top_k: int = Field(0, ge=-1, lt=2**31, description="keep this many likeliest tokens; 0 or -1: off")
    min_p: float = Field(0.0, ge=0, le=1, description="keep tokens at least this likely next to the best; 0: off")
    max_tokens: int | None = Field(
        None, ge=0, lt=2**31, description="exact limit of the output; None: up to max_seq_len"
    )
    min_tokens: int = Field(0, ge=0, lt=2**31, description="no stop token before this many generated tokens")
    seed: int | None = Field(None, ge=0, lt=2**64, description="None: chosen at the ingress")
    ignore_eos: bool = Field(False, description="generate on after the model's end-of-sequence tokens")
    stop: list[str] = Field(default_factory=list, description="strings that end the text; one string is accepted")
    stop_token_ids: list[int] = Field(default_factory=list, description="token ids that end the request, beside EOS")

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
    def _no_empty_stop(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("a stop string must not be empty")
        return value

    @field_validator("stop_token_ids")
    @classmethod
    def _ids_in_range(cls, value: list[int]) -> list[int]:
        if any(not 0 <= token < 2**31 for token in value):
            raise ValueError("stop_token_ids must be token ids, 0 or larger")
        return value

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} must not exceed max_tokens {self.max_tokens}")
        return self


def _tuple_as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
