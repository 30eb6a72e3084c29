"""What the exceptions of a Serve call to the engine mean."""

from __future__ import annotations

import logging

import ray
from ray.serve.exceptions import BackPressureError, RayServeException

from cluster.errors import EngineClosedError, EngineDeadError, EngineError, OverloadedError, RaydixError

logger = logging.getLogger("ray.serve")


def is_gone(error: Exception) -> bool:
    """Whether the replica that had the call is gone, or there is none."""
    return isinstance(error, ray.exceptions.RayError | RayServeException) and not isinstance(
        error, ray.exceptions.RayTaskError | BackPressureError
    )


def engine_error(error: Exception) -> RaydixError:
    """Ray's and Serve's errors of an engine call as ours."""
    if isinstance(error, RaydixError):
        return error
    if isinstance(error, ray.exceptions.TaskCancelledError):
        return EngineClosedError("the engine stopped before the request was finished")
    if isinstance(error, BackPressureError):
        return OverloadedError("too many requests are waiting; try again later")
    if isinstance(error, ray.exceptions.RayActorError | RayServeException):
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return EngineDeadError(f"the engine is gone: {first_line}")
    logger.error("an engine call failed", exc_info=error)
    return EngineError("internal error in the engine; its log has the details")
