"""`EngineConfig`: the one place for settings, the same from the command line, a YAML file and Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, ValidationInfo, field_validator

from cluster.errors import ConfigError
from cluster.routing import DEFAULT_BETA

MAX_SECONDS = 1e6
"""Longest of the times below: sockets count milliseconds in 32 bits."""


class EngineConfig(BaseModel):
    """Settings of one engine (one model copy on `tp_size` ranks). Unknown keys are refused.

    Sizes are tokens unless they say otherwise; times are seconds. `None` means "derived at start-up"; the effective
    values are printed once when the engine is ready.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(
        None, min_length=1, description="local directory or hub id; the default is SmolLM2-135M-Instruct"
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="name clients use; default: the model's directory or id"
    )
    load_format: Literal["safetensors", "dummy"] = Field(
        "safetensors", description="dummy: random weights, for benchmarks"
    )
    tp_size: int = Field(1, ge=1, description="ranks (worker actors) that share one copy of the model")
    device: Literal["auto", "cpu", "cuda", "fake"] = Field(
        "auto", description="auto: cuda if the cluster has GPUs; fake: no model, ranks answer at once with random words"
    )
    fake_tokens_per_s: float | None = Field(
        None, gt=0, description="device fake: input tokens a second of a rank, cached ones are free; default: no limit"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on cpu, the checkpoint's on cuda"
    )
    page_size: int = Field(16, ge=1, le=1024, description="tokens per KV page")
    num_pages: int | None = Field(None, ge=1, description="usable KV pages; default: what memory holds")
    max_running_requests: int = Field(256, ge=1, le=65536, description="rows of the page table")
    max_seq_len: int | None = Field(None, ge=2, description="prompt + output; default: the model's limit")
    max_step_tokens: int = Field(2048, ge=1, le=1 << 24, description="token budget of one step")
    cache_type: Literal["radix", "naive"] = Field("radix", description="prefix cache; naive never shares")
    kv_layout: Literal["layer_first", "page_first"] = Field("layer_first", description="memory order of the KV pool")
    attention_backend: Literal["auto", "torch", "triton", "flash"] = Field(
        "auto",
        description="flash: wait at start-up for FlashAttention-4 (cuda); auto: use it, if installed, once loaded",
    )
    overlap_depth: int = Field(2, ge=1, le=2, description="steps in flight; 1 switches overlap off")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of GPU memory the engine may use")
    gpus_per_rank: float = Field(
        1.0, gt=0, le=1, description="GPU share per rank; 0.5 puts two ranks on one card (gloo)"
    )
    tool_parser: Literal["auto", "none", "hermes", "llama3_json"] = Field(
        "auto", description="serve: format of the model's tool calls; auto: what its chat template teaches"
    )
    reasoning_parser: Literal["auto", "none", "think"] = Field(
        "auto", description="serve: think: answers may begin with <think>; auto: if the chat template knows of it"
    )
    policy: Literal["fcfs", "longest_prefix", "priority", "fair_share"] = Field(
        "fcfs", description="who is admitted next; priority: the request's priority, fair_share: by its user"
    )
    router: Literal["cache_aware", "power_of_two"] = Field(
        "cache_aware",
        description="serve: which replica gets a request; cache_aware: most of the prompt cached less load, "
        "power_of_two: Ray's own, the less busy of two",
    )
    router_beta: float = Field(
        DEFAULT_BETA,
        ge=0,
        le=1e6,
        description="cache_aware: cached tokens that outweigh one token of work; 0: load never counts",
    )
    router_digest_size: int = Field(
        65536,
        ge=1,
        le=1 << 24,
        description="cache_aware: prefixes an ingress knows of each replica, some 150 bytes and 64 tokens apiece",
    )
    max_queued_requests: int = Field(4096, ge=1, description="waiting requests before new ones get 429")
    integrity_interval: int = Field(
        1000, ge=0, description="every so many steps, check that each KV page has exactly one owner; 0: never"
    )
    flight_steps: int = Field(
        512, ge=0, description="steps that the flight recorder keeps, to be saved on a failure; 0: none"
    )
    record_tokens: bool = Field(
        False,
        description="flight recorder: keep token ids as well, which raydix replay needs; they are the users' text",
    )
    flight_dir: str | None = Field(
        None,
        min_length=1,
        description="where recordings are saved, on the driver's node; default: ~/.cache/raydix/flight",
    )
    start_timeout: float = Field(
        600.0, gt=0, le=MAX_SECONDS, description="deadline for placement, loading and hand-shake together"
    )
    placement_timeout: float = Field(
        20.0, gt=0, le=MAX_SECONDS, description="deadline for placement; raise it where nodes are added on demand"
    )
    step_timeout: float = Field(
        60.0,
        gt=0,
        le=MAX_SECONDS,
        description="a step without an answer for this long means a hung rank; long prompts have more, as measured",
    )
    compile_timeout: float = Field(
        120.0, ge=0, le=MAX_SECONDS, description="cuda: the first step of a kind may take this much longer than others"
    )
    max_recoveries: int = Field(
        5, ge=0, description="starts of new ranks after failures, within recovery_window; then the engine fails"
    )
    recovery_window: float = Field(600.0, gt=0, le=MAX_SECONDS, description="seconds in which max_recoveries count")
    spare_ranks: bool = Field(
        True, description="a process per rank waits to take its place when it fails: a much shorter pause, host memory"
    )
    drain_timeout: float = Field(
        30.0, ge=0, le=MAX_SECONDS, description="serve: seconds that running requests have to finish when it stops"
    )
    replica_timeout: float = Field(
        300.0,
        gt=0,
        le=MAX_SECONDS,
        description="serve: when an engine's process dies, its requests wait this long for another one",
    )
    api_key: list[SecretStr] = Field(
        default_factory=list,
        description="serve: a key that clients may use, repeat for several; default: none is needed",
    )
    max_body_bytes: int = Field(16 << 20, ge=1, description="serve: a larger request body gets 413")
    cors_origin: list[str] = Field(
        default_factory=list, description="serve: origin whose pages may call this server, * for any; default: none"
    )
    request_timeout: float | None = Field(
        None,
        gt=0,
        le=MAX_SECONDS,
        description="serve: seconds a request may take from arrival to its last token; default: no limit",
    )
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        description="serve: most tokens that a request may ask for, all its choices together; a client that reads "
        "nothing costs at most their text; default: what the context holds",
    )
    slow_reader_timeout: float = Field(
        30.0,
        gt=0,
        le=MAX_SECONDS,
        description="serve: a client that reads nothing for this many seconds loses its stream",
    )
    cache_dir: str | None = Field(None, description="where the default model is kept; default: ~/.cache/raydix")
    executor: Literal["ray", "inproc"] = Field(
        "ray", description="inproc: one rank in the driver's own process, without Ray, to see what Ray costs"
    )
    ray_address: str = Field(
        "auto", description="local: a private Ray; auto: a running one, else private; or HOST:PORT"
    )

    @field_validator("attention_backend")
    @classmethod
    def _flash_needs_a_gpu(cls, backend: str, info: ValidationInfo) -> str:
        if backend == "flash" and info.data.get("device") == "cpu":
            raise ValueError("FlashAttention-4 runs on a GPU, and device is cpu; use auto or torch")
        return backend

    @field_validator("executor")
    @classmethod
    def _one_rank_without_ray(cls, executor: str, info: ValidationInfo) -> str:
        tp_size = info.data.get("tp_size", 1)
        if executor == "inproc" and tp_size != 1:
            raise ValueError(f"inproc runs one rank, not tp_size {tp_size}; use executor ray")
        return executor

    @field_validator("api_key")
    @classmethod
    def _no_empty_key(cls, keys: list[SecretStr]) -> list[SecretStr]:
        if not all(key.get_secret_value() for key in keys):
            raise ValueError("a key must not be empty: is the variable that it comes from set?")
        return keys

    @classmethod
    def load(cls, file: str | Path | None = None, **overrides: Any) -> EngineConfig:
        """Settings from a YAML mapping, then `overrides` (None values are ignored).

        Raises:
            ConfigError: unreadable file, unknown key, or a value outside its limits; names each of them.
        """
        values: dict[str, Any] = {}
        if file is not None:
            try:
                values = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
            except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
                raise ConfigError(f"cannot read config file {file}: {error}") from error
            if not isinstance(values, dict):
                raise ConfigError(f"config file {file} must hold a mapping of settings, not {type(values).__name__}")
            values = {str(key): value for key, value in values.items()}  # YAML has other keys, which are unknown here
        return cls.parse(values | {key: value for key, value in overrides.items() if value is not None})

    @classmethod
    def parse(cls, values: dict[str, Any]) -> EngineConfig:
        """`EngineConfig(**values)` with pydantic's error turned into a one-line-per-problem ConfigError."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(describe(error, tuple(cls.model_fields))) from error


def describe(error: ValidationError, known: tuple[str, ...] = ()) -> str:
    """Pydantic's problems, one a line: field, message, and for an unknown key the nearest known one."""
    from difflib import get_close_matches

    lines = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"]) or "value"
        if problem["type"] == "extra_forbidden":
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
            lines.append(f"{name}: unknown setting{hint}")
        else:
            got = "" if name.startswith("api_key") else f" (got {problem['input']!r})"
            lines.append(f"{name}: {problem['msg']}{got}")
    return "\n".join(lines)
