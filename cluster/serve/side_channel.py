"""New tokens on their way from an engine to the ingresses: one message per step and ingress, over ZeroMQ.

A Serve call per token would cost more than the token. So an ingress binds a `StepReceiver` and hands its
`ReplyAddress` to the engine inside every Serve call; the engine's `StepSender` connects to it once and then sends,
after each step, one msgpack array with all new tokens of that ingress's streams::

    [VERSION, secret, channel, number, step_id, stream_ids int64[n], tokens int32[n], finish uint8[n], cached int32[n],
     {stream: error}, None or [index int32[m], top, words], {stream: [top, words]}]

`number` counts the messages of a channel, one connection of one engine, from 0: a connection that breaks may take
messages with it, and the ingress has to know. The last two are log probabilities of tokens and of prompts, see
`scheduler.step.LogprobBlock`. Arrays travel as little-endian bytes. Nothing is unpickled. On one node the pipe is an
ipc socket in a directory only this user can enter; between nodes it is tcp with CURVE, where the ingress admits the one
client key it made itself and passed through Ray. Whatever does not carry the address's secret and this schema is
dropped and counted.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from cluster.curve import KeyPair
from cluster.errors import TransportError
from scheduler.outputs import FinishReason
from scheduler.sampling_params import MAX_LOGPROBS
from scheduler.step import LogprobBlock, SampledLogprobs

VERSION = 3
_ARRAYS = (np.dtype("<i8"), np.dtype("<i4"), np.dtype("u1"), np.dtype("<i4"))
_LAST_FINISH = max(FinishReason)


@dataclass(frozen=True)
class ReplyAddress:
    """Where an ingress receives. Travels through Serve calls only: it holds the keys."""

    name: str
    node_id: str
    ipc: str
    tcp: str
    secret: bytes
    server_key: bytes
    client_keys: KeyPair


@dataclass(frozen=True)
class StepMessage:
    """Decoded message: equal-length arrays, one entry per (stream, token). Token -1 means none with this entry.

    It is the message `number`, from 0, of the connection named `channel`.
    """

    channel: bytes
    number: int
    step_id: int
    stream_ids: np.ndarray
    tokens: np.ndarray
    finish: np.ndarray
    cached_tokens: np.ndarray
    errors: dict[int, str]
    logprobs: SampledLogprobs | None = None  # of the entries that it indexes
    prompt_logprobs: dict[int, LogprobBlock] = field(default_factory=dict)

    def encode(self, secret: bytes) -> bytes:
        arrays = (self.stream_ids, self.tokens, self.finish, self.cached_tokens)
        packed = [array.astype(kind, copy=False).tobytes() for array, kind in zip(arrays, _ARRAYS, strict=True)]
        scored = None
        if self.logprobs is not None:
            scored = [self.logprobs.index.astype("<i4", copy=False).tobytes(), *_pack(self.logprobs.block)]
        prompts = {stream: _pack(block) for stream, block in self.prompt_logprobs.items()}
        head = [VERSION, secret, self.channel, self.number, self.step_id]
        return msgpack.packb([*head, *packed, self.errors, scored, prompts])

    @classmethod
    def decode(cls, data: bytes, secret: bytes) -> StepMessage:
        """Check every part of a received message.

        Raises:
            TransportError: not msgpack, another version, a wrong secret, or arrays and codes that make no sense.
        """
        try:
            parts = msgpack.unpackb(data, strict_map_key=False)
        except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: a key that cannot be hashed
            raise TransportError(f"not a step message: {error}") from error
        if not (isinstance(parts, list) and len(parts) == 12 and parts[0] == VERSION and isinstance(parts[1], bytes)):
            raise TransportError("not a step message of this version; engine and ingress must run the same raydix")
        if not secrets.compare_digest(parts[1], secret):
            raise TransportError("step message with a wrong secret")
        (channel, number, step_id), raw, failures = parts[2:5], parts[5:9], parts[9]
        numbers = isinstance(number, int) and isinstance(step_id, int)
        if not (numbers and all(isinstance(part, bytes) for part in (channel, *raw))):
            raise TransportError("step message with parts of wrong types")
        try:
            arrays = [np.frombuffer(part, kind) for part, kind in zip(raw, _ARRAYS, strict=True)]
        except ValueError as error:
            raise TransportError(f"step message with a cut-off array: {error}") from error
        if len({len(array) for array in arrays}) != 1:
            raise TransportError(f"step message with arrays of lengths {[len(array) for array in arrays]}")
        if len(arrays[0]) and (arrays[1].min() < -1 or arrays[2].max() > _LAST_FINISH or arrays[3].min() < 0):
            raise TransportError("step message with values out of range")
        if not (
            isinstance(failures, dict) and all(isinstance(k, int) and isinstance(v, str) for k, v in failures.items())
        ):
            raise TransportError("step message with a malformed error table")
        try:
            scored = None if parts[10] is None else _unpack_scored(*parts[10], len(arrays[0]))
            prompts = {int(stream): _unpack(*block) for stream, block in parts[11].items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise TransportError(f"step message with malformed log probabilities: {error}") from error
        return cls(channel, number, step_id, *arrays, failures, scored, prompts)


def _pack(block: LogprobBlock) -> list[Any]:
    return [block.top, block.words.astype("<i4", copy=False).tobytes()]


def _unpack(top: int, words: bytes) -> LogprobBlock:
    if not 0 <= top <= MAX_LOGPROBS:
        raise ValueError(f"{top} alternatives")
    return LogprobBlock(np.frombuffer(words, "<i4").reshape(-1, 2 + 2 * top))


def _unpack_scored(index: bytes, top: int, words: bytes, entries: int) -> SampledLogprobs:
    scored = SampledLogprobs(np.frombuffer(index, "<i4"), _unpack(top, words))
    if len(scored.index) != len(scored.block):
        raise ValueError(f"{len(scored.index)} places for {len(scored.block)} tokens")
    if len(scored.index) and not 0 <= scored.index.min() <= scored.index.max() < entries:
        raise ValueError("of a token that is not there")
    return scored
