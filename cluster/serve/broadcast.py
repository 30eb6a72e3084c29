"""Questions to every running replica of a deployment."""

from __future__ import annotations

import logging
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")

ANSWER_TIMEOUT = 6.0  # seconds; a replica whose driver is stuck says so after 5


async def ask_all(handle: DeploymentHandle, method: str, timeout: float = ANSWER_TIMEOUT) -> dict[str, Any]:
    """The answers of all replicas by their `replica` member. Starts no replica and waits for none.

    A replica that answers with an error is left out. If one does not answer at all within `timeout` seconds, the others
    count as silent too.
    """
    try:
        answers = await handle.broadcast(method).results_async(timeout_s=timeout, return_exceptions=True)
    except (RayError, RayServeException, TimeoutError) as error:
        logger.info("%s of %s: %s", method, handle.deployment_name, str(error) or type(error).__name__)
        return {}
    return {answer["replica"]: answer for answer in answers if not isinstance(answer, BaseException)}
