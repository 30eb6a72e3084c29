"""From step messages to text: the streams an ingress has open, and the groups its HTTP handlers read.

The receiving thread detokenises a whole step and then posts to the event loop once. In the loop each stream holds at
most one pending `Delta`: when its reader is slow, later deltas merge into it, so a slow client costs no more than its
text and delays nobody else.

A stream keeps its tokens, so that it can go on when its engine is gone: see `failover`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cluster.detokenizer import IncrementalDetokenizer
from cluster.errors import EngineClosedError, EngineError, PoisonRequestError, RaydixError
from cluster.serve.metrics import IngressMetrics
from cluster.serve.side_channel import StepMessage
from scheduler.outputs import FinishReason
from scheduler.step import LogprobBlock

logger = logging.getLogger(__name__)

# Connections of engines whose messages are counted: more than are open at a time, each engine that starts makes one.
MAX_CHANNELS = 1024


class ScoredToken(NamedTuple):
    """A generated token and its log probabilities, a block of one."""

    token: int
    block: LogprobBlock


@dataclass(slots=True)
class Delta:
    """What is new on one stream. The last delta has `finish_reason` or `error`.

    `num_tokens` counts the tokens behind it (also those without text yet); `cached_tokens` is the prompt's share that
    came from the prefix cache. `logprobs`: of the tokens behind the text, where they were asked for, and
    `prompt_logprobs`, once, of the prompt's but the first.
    """

    text: str = ""
    num_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    error: RaydixError | None = None
    logprobs: list[ScoredToken] | None = None
    prompt_logprobs: LogprobBlock | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def merge(self, later: Delta) -> None:
        self.text += later.text
        self.num_tokens += later.num_tokens
        self.cached_tokens = max(self.cached_tokens, later.cached_tokens)
        self.finish_reason, self.error = later.finish_reason, later.error
        if later.logprobs:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs


class TokenStream:
    """One choice of one request. `advance` runs in the receiving thread, everything else in the event loop.

    `tokens` are those that have arrived: append-only, and still only after `StreamTable.renew`. `complete`: the last
    one is among them, and the last delta on its way.
    """

    def __init__(
        self,
        stream_id: int,
        detokenizer: IncrementalDetokenizer,
        group: StreamGroup,
        index: int,
        arrived: float,
        include_stop: bool = False,
        top_logprobs: int = 0,
    ) -> None:
        self.stream_id = stream_id
        self.channel: bytes | None = None  # whence its tokens come
        self.tokens: list[int] = []
        self.complete = False
        self.group = group
        self.index = index
        self.arrived = arrived  # `time.monotonic()` of the HTTP request
        self.last_token: float | None = None  # when the latest token came
        self.pending: Delta | None = None
        self.ended = False  # the last delta was posted
        self.engine_ended = False  # the engine knows that the request is over
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self._top_logprobs = top_logprobs
        self._cached_tokens = 0
        self._silent_tokens = 0  # tokens whose text is not complete yet
        self._silent_logprobs: list[ScoredToken] = []
        self._prompt_logprobs: LogprobBlock | None = None

    def score_prompt(self, block: LogprobBlock) -> None:
        """The prompt's log probabilities; they go with the next delta."""
        self._prompt_logprobs = block

    def advance(
        self, token: int, finish: int, cached_tokens: int, failure: str | None, scores: LogprobBlock | None = None
    ) -> Delta | None:
        """Apply one entry of a step message; None when there is nothing to tell yet."""
        finished = finish != FinishReason.NONE
        if finished and (error := _error(finish, failure)) is not None:
            return Delta(error=error)
        if not self.tokens:  # what the first engine found; another finds this stream's own tokens too
            self._cached_tokens = cached_tokens
        if token >= 0:
            self.tokens.append(token)
        # The stop token itself is counted; it is text only for those who asked for it.
        ids = [token] if token >= 0 and (finish != FinishReason.STOP or self._include_stop) else []
        part = self._detokenizer.add(ids, finished)
        self._silent_tokens += token >= 0
        if scores is not None and ids:
            self._silent_logprobs.append(ScoredToken(token, scores.narrowed(self._top_logprobs)))
        reason = None
        if part.stopped:
            reason = "stop"
        elif finished:
            reason = "stop" if finish == FinishReason.STOP else "length"
        if not part.text and reason is None:
            return None
        delta = Delta(part.text, self._silent_tokens, self._cached_tokens, reason)
        self._silent_tokens = 0
        if self._silent_logprobs:
            delta.logprobs, self._silent_logprobs = self._silent_logprobs, []
        delta.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return delta


def _error(finish: int, failure: str | None) -> RaydixError | None:
    """What such an end raises, if anything; `failure`: what the engine says about it."""
    if finish == FinishReason.ERROR:
        return EngineError(failure or "the engine could not finish this request")
    if finish == FinishReason.POISON:
        return PoisonRequestError(failure or "the engine fails whenever this request runs")
    if finish == FinishReason.ABORT:
        return EngineClosedError("the request was aborted by the engine")
    return None


class StreamGroup:
    """The choices of one HTTP request, read as one sequence of (choice index, delta). Lives in the event loop.

    Iteration ends when every choice has ended. An error of any choice is raised, and so is `fail`'s.
    """

    def __init__(self, on_end: Callable[[TokenStream, Delta], None]) -> None:
        self.streams: list[TokenStream] = []
        self._on_end = on_end
        self._open = 0
        self._ready: deque[TokenStream] = deque()
        self._wake = asyncio.Event()
        self._failure: RaydixError | None = None

    def add(self, stream: TokenStream) -> None:
        self.streams.append(stream)
        self._open += 1

    def deliver(self, stream: TokenStream, delta: Delta) -> None:
        """Hand over the next delta of a stream; anything after its last one is dropped."""
        if stream.ended:
            return
        if delta.is_last:
            stream.ended = True
            self._on_end(stream, delta)
        if stream.pending is not None:
            stream.pending.merge(delta)
        else:
            stream.pending = delta
            self._ready.append(stream)
            self._wake.set()

    def fail(self, error: RaydixError) -> None:
        """End the whole group: its reader gets this error next."""
        self._failure = error
        self._wake.set()

    def __aiter__(self) -> StreamGroup:
        return self

    @property
    def has_next(self) -> bool:
        """Whether the next step of an iteration waits for nothing: a delta is there, or all has ended."""
        return bool(self._ready) or not self._open

    async def __anext__(self) -> tuple[int, Delta]:
        if not self._ready and self._open == 0:
            raise StopAsyncIteration
        while not self._ready and self._failure is None:
            self._wake.clear()
            await self._wake.wait()
        if self._failure is not None:
            raise self._failure
        stream = self._ready.popleft()
        delta, stream.pending = stream.pending, None
        self._open -= delta.is_last
        if delta.error is not None:
            raise delta.error
        return stream.index, delta


class StreamTable:
    """Every open stream of an ingress by id. `on_message` is the step receiver's callback.

    `on_gap` is called in the event loop with streams of which a message may have been lost; nothing more is taken for
    them until they are renewed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        metrics: IngressMetrics,
        on_gap: Callable[[list[TokenStream]], None] = lambda streams: None,
    ) -> None:
        self._loop = loop
        self._metrics = metrics
        self._on_gap = on_gap
        self._lock = threading.Lock()  # a message is taken as a whole before or after a stream is renewed
        self._heard: dict[bytes, int] = {}  # by channel, the one heard last at the end: messages so far
        self._ids = itertools.count(1)
        self._streams: dict[int, TokenStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(
        self,
        detokenizer: IncrementalDetokenizer,
        group: StreamGroup,
        index: int,
        arrived: float,
        include_stop: bool = False,
        top_logprobs: int = 0,
    ) -> TokenStream:
        """A new stream, known to the receiving thread from now on."""
        stream = TokenStream(next(self._ids), detokenizer, group, index, arrived, include_stop, top_logprobs)
        group.add(stream)
        self._streams[stream.stream_id] = stream
        return stream

    def renew(self, stream: TokenStream) -> bool:
        """Give the stream a new id: whatever is still on its way to the old one is dropped. False: it is complete."""
        with self._lock:
            self.forget(stream)
            if stream.complete:
                return False
            stream.stream_id, stream.channel = next(self._ids), None
            self._streams[stream.stream_id] = stream
            return True

    def forget(self, stream: TokenStream) -> None:
        """Drop whatever else arrives for this stream."""
        self._streams.pop(stream.stream_id, None)

    def on_message(self, message: StepMessage) -> None:
        """Detokenise one step and post it to the event loop in one go. Runs in the receiving thread."""
        with self._lock:
            gap = self._find_gap(message)
            posts = list(self._advance(message))
        if gap:
            logger.warning("a message is missing; %d streams ask for their tokens again", len(gap))
            self._loop.call_soon_threadsafe(self._on_gap, gap)
        if posts:
            self._loop.call_soon_threadsafe(_deliver, posts)

    def _find_gap(self, message: StepMessage) -> list[TokenStream]:
        """Streams that the messages missing before this one may have been about; they are forgotten."""
        expected = self._heard.pop(message.channel, 0)
        self._heard[message.channel] = message.number + 1
        if len(self._heard) > MAX_CHANNELS:
            del self._heard[next(iter(self._heard))]
        if message.number == expected:
            return []
        lost = [stream for stream in list(self._streams.values()) if stream.channel in (None, message.channel)]
        for stream in lost:
            self.forget(stream)
        return lost

    def _advance(self, message: StepMessage) -> Iterator[tuple[TokenStream, Delta, bool]]:
        now, first, later = time.monotonic(), [], []
        scored: dict[int, LogprobBlock] = {}  # by entry
        if message.logprobs is not None:
            index, block = message.logprobs
            scored = {entry: LogprobBlock(block.words[i : i + 1]) for i, entry in enumerate(index.tolist())}
        for stream_id, block in message.prompt_logprobs.items():
            if stream_id in self._streams:
                self._streams[stream_id].score_prompt(block)
        columns = (message.stream_ids, message.tokens, message.finish, message.cached_tokens)
        entries = zip(*(column.tolist() for column in columns), strict=True)
        for entry, (stream_id, token, finish, cached) in enumerate(entries):
            stream = self._streams.get(stream_id)
            if stream is None:  # its reader left
                continue
            if token >= 0:
                if stream.last_token is None:
                    first.append(now - stream.arrived)
                else:
                    later.append(now - stream.last_token)
                stream.last_token = now
            stream.channel = message.channel
            try:
                delta = stream.advance(token, finish, cached, message.errors.get(stream_id), scored.get(entry))
            except Exception:  # one stream's text must not stop the others'
                logger.exception("cannot detokenise stream %d", stream_id)
                delta = Delta(error=EngineError("internal error while turning tokens into text"))
            if delta is not None:
                if delta.is_last:
                    stream.complete = True
                    self.forget(stream)
                yield stream, delta, finish != FinishReason.NONE
        self._metrics.tokens(first, later)


def _deliver(posts: list[tuple[TokenStream, Delta, bool]]) -> None:
    for stream, delta, engine_ended in posts:
        stream.engine_ended |= engine_ended
        stream.group.deliver(stream, delta)
