"""How a Serve replica learns that it is being stopped: Serve does not say, but its controller answers questions."""

from __future__ import annotations

import asyncio
import logging

from ray import serve
from ray.serve.context import _get_global_client

logger = logging.getLogger("ray.serve")

ASK_INTERVAL = 5.0  # seconds
_ENDING = ("STOPPING",)


async def retired() -> None:
    """Returns when the replica of this process is being stopped; about `ASK_INTERVAL` seconds late."""
    context = serve.get_replica_context()
    me = context.replica_id.unique_id
    while True:
        await asyncio.sleep(ASK_INTERVAL)
        try:
            state = await asyncio.to_thread(_state, context.app_name, context.deployment, me)
        except Exception as error:  # the controller is starting again
            logger.debug("cannot ask the controller: %s", error)
            continue
        if state in _ENDING:
            return


def _state(application: str, deployment: str, replica: str) -> str | None:
    details = _get_global_client().get_serve_details()
    replicas = details["applications"][application]["deployments"][deployment]["replicas"]
    return next((each["state"] for each in replicas if each["replica_id"] == replica), None)
