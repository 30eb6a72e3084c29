"""From step messages to text: the streams an ingress has open, and the groups its HTTP handlers read.

The receiving thread detokenises a whole step and then posts to the event loop once. In the loop each stream holds at
most one pending `Delta`: when its reader is slow, later deltas merge into it, so a slow client costs no more than its
text and delays nobody else.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from cluster.detokenizer import IncrementalDetokenizer
from cluster.errors import EngineError, RaydixError
from cluster.serve.metrics import IngressMetrics
from cluster.serve.side_channel import StepMessage
from cluster.serve.token_stream import Delta, TokenStream
from scheduler.outputs import FinishReason
from scheduler.step import LogprobBlock

logger = logging.getLogger(__name__)

# Connections of engines whose messages are counted: more than are open at a time, each engine that starts makes one.
MAX_CHANNELS = 1024


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
        """Detokenise one step and post it to the event loop in one go. Runs in the receiving thread.

        Where that fails, the rest of the message is as good as lost.
        """
        posts: list[tuple[TokenStream, Delta, bool]] = []
        with self._lock:
            gap = self._find_gap(message)
            try:
                for post in self._advance(message):
                    posts.append(post)
            except Exception:
                logger.exception("cannot take step message %d", message.step_id)
                gap += self._lose(message.channel)
        if gap:
            logger.warning("a message is missing or was not read; %d streams ask for their tokens again", len(gap))
            self._loop.call_soon_threadsafe(self._on_gap, gap)
        if posts:
            self._loop.call_soon_threadsafe(_deliver, posts)

    def _find_gap(self, message: StepMessage) -> list[TokenStream]:
        """Streams that the messages missing before this one may have been about, forgotten."""
        expected = self._heard.pop(message.channel, 0)
        self._heard[message.channel] = message.number + 1
        if len(self._heard) > MAX_CHANNELS:
            del self._heard[next(iter(self._heard))]
        return [] if message.number == expected else self._lose(message.channel)

    def _lose(self, channel: bytes) -> list[TokenStream]:
        """The streams that a message of this channel may have been about, forgotten."""
        lost = [stream for stream in list(self._streams.values()) if stream.channel in (None, channel)]
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
            if (stream := self._streams.get(stream_id)) is not None:
                stream.score_prompt(block)
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
