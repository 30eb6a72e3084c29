"""Every error raydix raises on purpose, as one tree. Boundaries map their dependencies' errors into it.

::

    RaydixError
    |-- ConfigError               a setting is wrong or does not fit the model or machine   (ValueError)
    |   `-- ModelLoadError        a checkpoint is missing, incomplete or of an unknown kind
    |-- InvalidRequestError       a request is wrong; the engine is not affected   (ValueError, HTTP 400)
    |   |-- UnknownModelError     the request names a model that is not served   (HTTP 404)
    |   `-- OutgrownError         a begun request cannot go on: the KV cache, or its grammar's limits   (HTTP 400)
    |-- EngineError               the engine cannot serve
    |   |-- StartupError          the group did not come up: says rank, phase and cause
    |   |   `-- PlacementError    the cluster cannot hold the group: says what was asked and what is there
    |   |-- EngineDeadError       a rank died or hung; the request cannot be finished   (HTTP 503)
    |   |-- EngineClosedError     the engine was shut down   (HTTP 503)
    |   `-- NotReadyError         the server is starting or stopping: no requests now   (HTTP 503)
    |-- RequestFailedError        one request was given up, others were not: its numbers, or its pages   (HTTP 500)
    |-- PoisonRequestError        ranks fail whenever this request runs; it alone was given up   (HTTP 500)
    |-- RecordingError            a recording of the flight recorder cannot be read or run
    |-- OverloadedError           the queue is full   (HTTP 429)
    `-- TransportError            a peer speaks another version, or not at all
"""

from __future__ import annotations


class RaydixError(Exception):
    """Base of all errors raydix raises on purpose. `status` is the HTTP status it maps to."""

    status = 500
    type = "internal_error"


class ConfigError(RaydixError, ValueError):
    """A setting is wrong, or does not fit the model or the machine."""


class ModelLoadError(ConfigError):
    """A checkpoint cannot be found or read, lacks a tensor, or is of an architecture we do not have."""


class InvalidRequestError(RaydixError, ValueError):
    """A request is wrong. `param` names the offending field where there is one."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModelError(InvalidRequestError):
    """The request names a model that is not served here."""

    status = 404
    type = "not_found_error"


class OutgrownError(InvalidRequestError):
    """A request that was begun cannot go on: it needs more of the KV cache, or of its grammar, than there can be."""


class EngineError(RaydixError):
    """The engine cannot serve."""

    status = 503
    type = "service_unavailable"


class StartupError(EngineError):
    """The group did not come up. The message says which rank, in which phase, and why."""


class PlacementError(StartupError):
    """The cluster cannot hold the group. The message says what was asked and what each node has."""


class EngineDeadError(EngineError):
    """A rank died or stopped answering; requests in flight cannot be finished by this engine."""


class EngineClosedError(EngineError):
    """The engine was shut down."""


class NotReadyError(EngineError):
    """The server takes no requests yet, or none any more; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestFailedError(RaydixError):
    """One request was given up while others went on: its scores were no numbers, or its pages of the KV cache were
    found corrupted."""


class PoisonRequestError(RaydixError):
    """Ranks failed each time this request ran, also when it ran alone. Others were served."""


class RecordingError(RaydixError, ValueError):
    """A file of the flight recorder is damaged, of another version, or lacks what was asked of it; or none can be
    made."""

    status = 409
    type = "recording_error"


class OverloadedError(RaydixError):
    """The queue is full; try again after `retry_after` seconds."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TransportError(RaydixError):
    """A peer speaks another protocol version, or does not answer."""
