"""`Failover`: what an ingress does with streams whose engine replica is gone. They wait for another and go on there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from enum import Enum

from cluster.errors import EngineDeadError, PoisonRequestError, RaydixError, TransportError
from cluster.recovery import FIRST_DELAY, Suspects
from cluster.serve.token_stream import TokenStream

logger = logging.getLogger("ray.serve")

GATHER = 0.2  # seconds in which the calls to one dead replica fail, one after the other
CHECK = 0.1  # seconds between looks at whether streams get on
LAST_DELAY = 10.0  # seconds before a loss is answered, at most
CONNECTION_LOSSES = 3  # of one stream in a row, until it fails
HELD_TIMEOUTS = 10  # timeouts that streams may stand in the line of an engine that is well


class Loss(Enum):
    """What is gone: the engine's process, the engine in it by order, or the connection to it."""

    DEATH = 0
    CLOSED = 1
    CONNECTION = 2


class Failover:
    """Sends streams to an engine again, with the tokens they have. All methods run in the event loop.

    Serve chooses the replica, or keeps the call until there is one. Losses in a row, without a token in between, are
    answered later each time. A request that was there in two deaths in a row runs alone, and fails alone if the replica
    dies once more (see `Suspects`); others, new ones too, wait meanwhile.

    Args:
        timeout: seconds without any sign of life after which all streams that wait fail. That an engine which is well
            has one of them, be it behind others, counts as a sign, for `HELD_TIMEOUTS` times as long.
        submit: sends a stream, which has been renewed, to the engine.
        fail: ends a stream with an error.
        is_held: whether an engine that is well has the stream, or will as soon as it takes one more.
    """

    def __init__(
        self,
        timeout: float,
        submit: Callable[[TokenStream], None],
        fail: Callable[[TokenStream, RaydixError], None],
        is_held: Callable[[TokenStream], bool],
    ) -> None:
        self._timeout = timeout
        self._submit = submit
        self._fail = fail
        self._is_held = is_held
        self._lost: dict[TokenStream, Loss] = {}  # not judged yet
        self._away: dict[TokenStream, int] = {}  # without a token since the loss; how many they had
        self._waiting: list[TokenStream] = []  # of those, the ones that are not sent yet
        self._connection_losses: dict[TokenStream, int] = {}
        self._suspects: Suspects[TokenStream] = Suspects()
        self._losses = 0  # in a row
        self._last_sign = 0.0  # `time.monotonic()` of the latest loss after a token, or token after a loss
        self._last_held = 0.0  # when an engine that was well had one of `_away`
        self._cause = ""
        self._watching = False

    @property
    def active(self) -> bool:
        """Whether streams wait for an engine."""
        return self._watching

    def admit(self, stream: TokenStream) -> None:
        """Send a new stream to the engine, or keep it while there is none."""
        if self._watching:
            self._away[stream] = 0
        if self._suspects.alone is None:
            self._submit(stream)
        else:
            self._waiting.append(stream)

    def lost(self, stream: TokenStream, cause: str, loss: Loss) -> None:
        """The stream, which has been renewed, is served no more."""
        if not self._lost:
            asyncio.get_running_loop().call_later(GATHER, self._judge)
        self._lost[stream] = loss
        self._cause = cause

    def _judge(self) -> None:
        """What has been lost belongs to one event."""
        lost = {stream: loss for stream, loss in self._lost.items() if not stream.ended}
        self._lost = {}
        if not lost:
            return
        self._losses += 1
        if self._losses == 1:
            self._last_sign = time.monotonic()
        logger.warning("%s; %d streams go on elsewhere", self._cause, len(lost))
        dead = {stream: len(stream.tokens) for stream, loss in lost.items() if loss is Loss.DEATH}
        if dead:
            poison = self._suspects.failed(dead)
            if poison is not None:
                self._losses = 1
                message = "the engine dies whenever this request runs, also when it runs alone"
                self._fail(poison, PoisonRequestError(f"{message}: {self._cause}"))
        for stream, loss in lost.items():
            if loss is Loss.CONNECTION and self._too_often(stream):
                self._fail(stream, TransportError(f"{self._cause}, {CONNECTION_LOSSES} times in a row"))
        again = [stream for stream in lost if not stream.ended]
        self._away |= {stream: len(stream.tokens) for stream in again}
        self._waiting = sorted({*self._waiting, *again}, key=lambda stream: stream.arrived)
        self._review()
        delay = 0.0 if self._losses == 1 else min(FIRST_DELAY * 2.0 ** (self._losses - 2), LAST_DELAY)
        asyncio.get_running_loop().call_later(delay, self._resubmit)
        if not self._watching:
            self._watching = True
            asyncio.get_running_loop().call_later(CHECK, self._watch)

    def _too_often(self, stream: TokenStream) -> bool:
        losses = self._connection_losses[stream] = self._connection_losses.get(stream, 0) + 1
        return losses >= CONNECTION_LOSSES

    def _resubmit(self) -> None:
        """Send whoever may run now."""
        waiting, self._waiting = [stream for stream in self._waiting if not stream.ended], []
        for stream in waiting:
            if self._suspects.alone in (None, stream):
                self._submit(stream)
            else:
                self._waiting.append(stream)

    def _watch(self) -> None:
        """Until every stream that was lost got on or ended, or time is up."""
        now = time.monotonic()
        for stream, known in list(self._away.items()):
            if len(stream.tokens) > known or stream.ended:
                del self._away[stream]
                self._connection_losses.pop(stream, None)
                self._last_sign, self._losses = now, 0
        alone = self._suspects.alone
        self._review()
        if self._suspects.alone is not alone:
            self._resubmit()
        if any(map(self._is_held, self._away)):
            self._last_held = now
        if now - max(self._last_sign, self._last_held) > self._timeout:
            self._give_up(1)
        elif now - self._last_sign > HELD_TIMEOUTS * self._timeout:
            self._give_up(HELD_TIMEOUTS)
        if self._away or self._lost or self._suspects.alone is not None:
            asyncio.get_running_loop().call_later(CHECK, self._watch)
        else:
            self._watching, self._losses = False, 0

    def _review(self) -> None:
        self._suspects.review(lambda stream: None if stream.ended or stream.complete else len(stream.tokens))

    def _give_up(self, rounds: int) -> None:
        """`rounds`: the timeouts that are over."""
        limit = "replica_timeout" if rounds == 1 else f"{rounds} x replica_timeout"
        error = EngineDeadError(f"{self._cause}; no other took over within {rounds * self._timeout:g} s ({limit})")
        streams, self._away, self._waiting = list(self._away), {}, []
        self._suspects, self._losses = Suspects(), 0
        self._connection_losses.clear()
        for stream in streams:
            self._fail(stream, error)
