"""Errors as OpenAI clients read them: a status and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from cluster import errors
from cluster.errors import InvalidRequestError, NotReadyError, OverloadedError, RaydixError

logger = logging.getLogger(__name__)


class ContextLengthError(InvalidRequestError):
    """The prompt, or prompt and output together, are longer than the model's context."""


class AuthenticationError(RaydixError):
    """The request carries none of the server's API keys."""

    status = 401
    type = "authentication_error"


class RequestTimeoutError(RaydixError):
    """The request's deadline passed before its last token."""

    status = 408
    type = "timeout_error"


class ToolCallError(RaydixError):
    """A call was required and the model wrote none that can be read."""

    status = 422
    type = "tool_call_error"


_CODES = {
    ToolCallError: "no_tool_call",
    AuthenticationError: "invalid_api_key",
    RequestTimeoutError: "request_timeout",
    ContextLengthError: "context_length_exceeded",
    errors.UnknownModelError: "model_not_found",
    errors.OutgrownError: "request_outgrown",
    errors.RequestFailedError: "request_failed",
    errors.OverloadedError: "rate_limit_exceeded",
    errors.PoisonRequestError: "poison_request",
    errors.EngineDeadError: "engine_dead",
    errors.EngineClosedError: "engine_closed",
}

# OpenAI's clients would send the whole request again: with the same deadline, or to kill more ranks.
_NOT_AGAIN = (RequestTimeoutError, errors.PoisonRequestError, errors.RequestFailedError)

MAX_FINDINGS = 20  # of a body with a million mistakes
_BODY_PROBLEMS = {  # what the reading of a body fails with, other than a mistake in its JSON
    RecursionError: "the body's JSON is nested too deeply",
    UnicodeDecodeError: "the body is not valid UTF-8",
}
_NO_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"


@dataclass(frozen=True)
class Problem:
    """What a client gets for an error."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def problem_of(error: BaseException) -> Problem:
    """The answer to `error`. An error nobody foresaw is logged with its trace and answered without details."""
    if isinstance(error, RaydixError):
        headers = {}
        if isinstance(error, OverloadedError | NotReadyError):
            headers["Retry-After"] = str(error.retry_after)
        elif isinstance(error, AuthenticationError):
            headers["WWW-Authenticate"] = "Bearer"
        elif isinstance(error, _NOT_AGAIN):
            headers["X-Should-Retry"] = "false"
        code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)
        return Problem(error.status, str(error), error.type, getattr(error, "param", None), code, headers)
    if isinstance(error, RequestValidationError):
        return _validation_problem(error)
    if isinstance(error, HTTPException):
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        message = next((text for cause, text in _BODY_PROBLEMS.items() if isinstance(error.__cause__, cause)), None)
        return Problem(error.status_code, message or str(error.detail), kind, headers=dict(error.headers or {}))
    logger.error("unexpected error", exc_info=error)
    return Problem(500, "internal error; the server's log has the details", "internal_error")


def _validation_problem(error: RequestValidationError) -> Problem:
    """Pydantic's findings in one sentence each; `param` names the first field."""
    lines: list[str] = []
    params: list[str | None] = []
    for finding in error.errors()[:MAX_FINDINGS]:
        path = finding["loc"][1:]  # without "body"
        if finding["type"] == "json_invalid":
            detail = finding.get("ctx", {}).get("error", "")
            lines.append(f"the body is not valid JSON: {detail} at character {path[0] if path else 0}")
            params.append(None)
            continue
        cause = finding.get("ctx", {}).get("error")
        fields = _fields(path, error.body, finding["type"] == "missing")
        name = ".".join([*fields, cause.param] if hasattr(cause, "param") else fields) or None
        params.append(name)
        if finding["type"] == "extra_forbidden":
            lines.append(f"unknown field '{name}'")
        elif hasattr(cause, "param"):
            lines.append(str(cause) if name in str(cause) else f"{name}: {cause}")
        else:
            no_object = finding["type"] in ("model_attributes_type", "model_type")
            message = "it must be a JSON object" if no_object else finding["msg"].removeprefix("Value error, ")
            no_body = no_object or finding["type"] == "missing"
            lines.append(f"{name}: {message}" if name else _NO_OBJECT if no_body else message)
    unique = list(dict.fromkeys(lines))
    return Problem(400, "; ".join(unique), "invalid_request_error", params[0] if params else None)


def _fields(path: Sequence[str | int], body: Any, missing: bool) -> list[str]:
    """`messages`, `0`, `role` from pydantic's location, in which the members of unions have names as well: those are
    what the body has nothing under. `missing`: it lacks the last one, which is a field."""
    lacking = [str(part) for part in path[-1:]] if missing else []
    kept: list[str] = []
    for part in path[: len(path) - len(lacking)]:
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and part in range(len(body))):
            kept.append(str(part))
            body = body[part]
    return kept + lacking


def to_wire(error: RaydixError) -> dict[str, Any]:
    """A RaydixError as plain values, for the reply of an engine call."""
    values = {name: getattr(error, name) for name in ("param", "retry_after") if getattr(error, name, None) is not None}
    return {"kind": type(error).__name__, "message": str(error), **values}


def from_wire(values: dict[str, Any]) -> RaydixError:
    """The inverse of `to_wire`."""
    kind = getattr(errors, values["kind"], errors.EngineError)
    if issubclass(kind, InvalidRequestError):
        return kind(values["message"], values.get("param"))
    if issubclass(kind, OverloadedError):
        return kind(values["message"], values.get("retry_after", 1))
    return kind(values["message"])
