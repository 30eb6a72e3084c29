"""Keeps an ingress subscribed to the reports of every engine replica (`publisher`)."""

from __future__ import annotations

import asyncio
import logging

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.serve.fleet import Fleet
from cluster.serve.side_channel import ReplyAddress

logger = logging.getLogger("ray.serve")

LOOK = 0.2  # seconds between looks at the fleet
ANSWER_TIMEOUT = 2.0


class Subscriber:
    """Asks all replicas for reports while the fleet knows too little of one. Lives in the event loop."""

    def __init__(self, handle: DeploymentHandle, address: ReplyAddress, fleet: Fleet) -> None:
        self._handle = handle
        self._address = address
        self._fleet = fleet
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            if not self._fleet.unknown:
                continue
            try:
                calls = self._handle.broadcast("subscribe", self._address)
                await calls.results_async(timeout_s=ANSWER_TIMEOUT, return_exceptions=True)
            except (RayError, RayServeException, TimeoutError) as error:
                logger.info("not all engine replicas report yet: %s", error)
            except Exception:
                logger.exception("cannot ask the engine replicas for reports")
            await asyncio.sleep(ANSWER_TIMEOUT)  # the reports are on their way
