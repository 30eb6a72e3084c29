"""What a stream asks of the engine, as the ingress keeps it while the stream is open."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass, field

import numpy as np
from ray.serve.handle import DeploymentResponse

from cluster.serve.fleet import Fleet, Ticket
from scheduler.sampling_params import SamplingParams


@dataclass(frozen=True)
class GroupOptions:
    """How the streams of one HTTP request are served.

    arrived              `time.monotonic()` of the request, from which latencies and the deadline count
    timeout              seconds from then to the last token; None: no limit
    continues_text, include_stop, skip_special_tokens   see `IncrementalDetokenizer`
    priority, user       see `scheduler.request.Request`
    """

    arrived: float
    timeout: float | None = None
    skip_special_tokens: bool = True
    continues_text: bool = False
    include_stop: bool = False
    priority: int = 0
    user: str | None = None


@dataclass
class Prompt:
    """A prompt's ids, int32, and their hashes once they are known: made once for all choices."""

    ids: np.ndarray
    hashes: list[int] | None = None

    def ticket(self, fleet: Fleet, max_tokens: int) -> Ticket:
        """Of a request that begins with it."""
        if self.hashes is None:
            ticket = fleet.ticket(self.ids, max_tokens)
            self.hashes = ticket.hashes
            return ticket
        return Ticket(fleet, self.hashes, len(self.ids), max_tokens)


@dataclass
class OpenCall:
    """What a stream asks of the engine, and the Serve call that asks it now."""

    prompt: Prompt
    sampling: SamplingParams
    options: GroupOptions
    response: DeploymentResponse | None = None
    ticket: Ticket | None = None
    starts: int = 0
    # not that of the HTTP request: Serve gives all calls in it one id, by which a router tells calls apart
    context: contextvars.Context = field(default_factory=contextvars.Context)
