"""Start-up timeline: when each phase began, for the driver and for every rank."""

from __future__ import annotations

import logging
import time

from cluster.progress import Progress

logger = logging.getLogger(__name__)


class Timeline:
    """Records phases and passes them on to a progress callback and the log.

    The driver's phases follow each other; a rank's phases do so per rank, side by side with the other ranks'.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._start = time.monotonic()
        self._open: dict[int | None, tuple[str, float]] = {}
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str, rank: int | None = None, fraction: float = 0.0) -> None:
        """`rank` (None: the driver) is in `phase`, `fraction` of it done. Ends the phase it was in before."""
        now = time.monotonic()
        current = self._open.get(rank)
        who = "" if rank is None else f"rank {rank}: "
        if current is None or current[0] != phase:
            self._close(rank, now)
            self._open[rank] = (phase, now)
            logger.debug("%6.2f s  %s%s", now - self._start, who, phase)
        self._progress(who + phase, fraction)

    def finish(self) -> None:
        """Everything is up: end all phases."""
        now = time.monotonic()
        for rank in list(self._open):
            self._close(rank, now)
        self._seconds["total"] = now - self._start

    def phase_of(self, rank: int) -> str:
        """The phase `rank` was last heard in."""
        return self._open[rank][0] if rank in self._open else "start of its process"

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase that ended; of the ranks' phases the slowest rank's."""
        return dict(self._seconds)

    def __str__(self) -> str:
        return ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self._seconds.items())

    def _close(self, rank: int | None, now: float) -> None:
        if rank in self._open:
            phase, began = self._open.pop(rank)
            self._seconds[phase] = max(self._seconds.get(phase, 0.0), now - began)
