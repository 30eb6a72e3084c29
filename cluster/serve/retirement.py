"""How a Serve replica learns that it is being stopped: Serve does not say, but its controller answers questions."""

from __future__ import annotations

import asyncio
import logging

from ray import serve
from ray.serve.context import _get_global_client

logger = logging.getLogger("ray.serve")

ASK_INTERVAL = 4.0  # seconds
CONFIRM_INTERVAL = 1.0


async def retired() -> None:
    """Returns when the replica of this process is being stopped, `ASK_INTERVAL` seconds late or a little more."""
    context = serve.get_replica_context()
    me = context.replica_id.unique_id
    seen = 0  # times in a row that the controller had it as stopping: it may just have started again itself
    while seen < 2:
        await asyncio.sleep(CONFIRM_INTERVAL if seen else ASK_INTERVAL)
        try:
            stops = await asyncio.to_thread(_is_stopping, context.app_name, context.deployment, me)
        except Exception as error:
            logger.debug("cannot ask the controller: %s", error)
            continue
        seen = seen + 1 if stops else 0


def _is_stopping(application: str, deployment: str, replica: str) -> bool:
    """A deployment that is being deleted is not there any more; of one that is updated, old replicas are stopping."""
    applications = _get_global_client().get_serve_details()["applications"]
    deployments = applications.get(application, {}).get("deployments", {})
    states = {each["replica_id"]: each["state"] for each in deployments.get(deployment, {}).get("replicas", ())}
    return states.get(replica, "STOPPING") == "STOPPING"
