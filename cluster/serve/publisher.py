"""An engine replica's reports to the ingresses: what changed in its prefix cache, and the work it has.

A few times a second while requests run, and once a second otherwise. Each ingress is told the work of the others'
requests; its own it knows better than any report can say.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from cluster.engine import Engine
from cluster.serve.replica_report import ReplicaReport
from cluster.serve.step_sender import StepSender
from kvcache.digest import DigestChange, DigestReading

logger = logging.getLogger("ray.serve")

INTERVAL = 0.1  # seconds between reports
IDLE_TURNS = 10  # intervals to a report with nothing new


class Publisher:
    """Reports of one replica. Everything runs in its event loop."""

    def __init__(self, replica: str, block: int, engine: Engine, sender: StepSender) -> None:
        self._replica = replica
        self._block = block
        self._engine = engine
        self._sender = sender
        self._work: Counter[int] = Counter()  # channel -> outstanding tokens of its requests
        self._sequences: dict[int, int] = {}  # subscribed channels -> reports sent
        self._task: asyncio.Task[None] | None = None
        self._busy = False  # requests ran since the last report
        self._turns = 0

    @property
    def outstanding(self) -> int:
        """Tokens of work of all open requests."""
        return self._work.total()

    @contextmanager
    def counted(self, channel: int, work: int) -> Iterator[None]:
        """Count a request's work while the block runs."""
        self._work[channel] += work
        self._busy = True
        try:
            yield
        finally:
            self._work[channel] -= work
            if not self._work[channel]:
                del self._work[channel]

    def subscribe(self, channel: int) -> None:
        """Its first report tells everything. Call again whenever it missed one."""
        self._sequences[channel] = 0
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                await self._publish()
            except Exception:  # routers must not lose a replica that serves
                logger.exception("cannot report to the ingresses")

    async def _publish(self) -> None:
        self._turns += 1
        new = 0 in self._sequences.values()
        if not (self._busy or new or self._turns >= IDLE_TURNS):
            return
        self._turns = 0
        self._busy = self.outstanding > 0
        channels = list(self._sequences)
        reading = await asyncio.to_thread(self._engine.read_digest, new)
        failed = self._engine.failure is not None
        if failed:  # it holds nothing any more; until Serve ends it, each report says that it is not well
            reading = DigestReading.empty()
        elif reading is None:  # silence says that this replica is not well, and then everything is told anew
            self._sequences = dict.fromkeys(self._sequences, 0)
            return
        for channel in channels:
            self._report(channel, reading, failed or self._engine.recovering is not None)

    def _report(self, channel: int, reading: DigestReading, unwell: bool) -> None:
        sequence = self._sequences[channel]
        change = reading.change
        if not sequence:
            if reading.hashes is None:  # it came while the others' report was being read
                return
            change = DigestChange(True, reading.hashes, np.empty(0, dtype=np.uint64))
        report = ReplicaReport(
            self._replica,
            sequence + 1,
            self._block,
            change,
            self.outstanding - self._work[channel],
            unwell,
        )
        if self._sender.send_report(channel, report):
            self._sequences[channel] = sequence + 1
        else:
            del self._sequences[channel]
