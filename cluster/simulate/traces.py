"""What is asked of the engines: a list of requests, made up (`synthetic`) or read from a file.

ShareGPT      JSON list of {"conversations": [{"from": "human" | "gpt", "value": text}, ...]}. A conversation is a
              session: each answer's length and the growing prompt come from the file, arrivals from `rate` and
              `think_time`. A token is taken to be 4 bytes of UTF-8.
Mooncake      JSON lines {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}, where equal hash
              ids name equal blocks of 512 prompt tokens (Qin et al., Mooncake, 2024; its published traces).
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cluster.errors import ConfigError
from cluster.simulate.tokens import Segment

MOONCAKE_BLOCK = 512
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Its output is stream `output_key`, exactly `output_len` tokens.

    `arrival` is in seconds from the start; where `after` names an earlier request of the trace, from that one's end.
    """

    arrival: float
    prompt: tuple[Segment, ...]
    output_len: int
    output_key: int
    after: int | None = None
    user: str | None = None
    priority: int = 0

    @property
    def prompt_len(self) -> int:
        return sum(segment.count for segment in self.prompt)


@dataclass(frozen=True)
class Trace:
    """Requests, numbered by their place in the list; a request comes after the one it waits for."""

    name: str
    requests: list[TraceRequest]

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_len for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_len for request in self.requests)


def session_starts(count: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """float64[count]: a Poisson process of `rate` per second from time 0; an infinite rate starts all at once."""
    if np.isinf(rate):
        return np.zeros(count)
    return np.cumsum(rng.exponential(1 / rate, count))


def load_trace(path: Path, limit: int | None, rate: float, think_time: float, seed: int, speed: float) -> Trace:
    """A trace file, its kind told from its first character: `[` is ShareGPT, `{` Mooncake.

    Args:
        limit: take at most so many requests from the front.
        rate, think_time, seed: arrivals of ShareGPT's conversations (a second) and pauses within (mean seconds).
        speed: Mooncake's arrivals are this many times as fast.

    Raises:
        ConfigError: the file cannot be read, or an entry lacks something; names it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    if text.lstrip()[:1] == "[":
        requests = _sharegpt(path, text, limit, rate, think_time, np.random.default_rng(seed))
    else:
        requests = _mooncake(path, text, limit, speed)
    if not requests:
        raise ConfigError(f"the trace {path} holds no request")
    return Trace(path.name, requests)


def _sharegpt(
    path: Path, text: str, limit: int | None, rate: float, think_time: float, rng: np.random.Generator
) -> list[TraceRequest]:
    try:
        conversations = [exchanges(entry["conversations"]) for entry in json.loads(text)]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no ShareGPT trace (a list of objects with `conversations` of `from` and `value`): {error!r}"
        ) from error
    conversations = [pairs for pairs in conversations if pairs]
    turns = sum(map(len, conversations)) / max(len(conversations), 1)
    starts = session_starts(len(conversations), rate / max(turns, 1), rng)
    requests: list[TraceRequest] = []
    for start, pairs in zip(starts.tolist(), conversations, strict=True):
        prompt: tuple[Segment, ...] = ()
        for turn, (question, answer) in enumerate(pairs):
            if limit is not None and len(requests) >= limit:
                return requests
            prompt = (*prompt, _text_segment(question))
            reply = _text_segment(answer)
            when = float(rng.exponential(think_time)) if turn else start
            after = len(requests) - 1 if turn else None
            requests.append(TraceRequest(when, prompt, reply.count, reply.key, after))
            prompt = (*prompt, reply)
    return requests


def exchanges(conversation: list[dict[str, str]]) -> list[tuple[str, str]]:
    """(question, answer) pairs of a ShareGPT conversation; what stands alone is left out."""
    pairs, question = [], None
    for message in conversation:
        if message["from"] in ("human", "user"):
            question = message["value"]
        elif message["from"] in ("gpt", "assistant") and question is not None:
            pairs.append((question, message["value"]))
            question = None
    return pairs


def _text_segment(text: str) -> Segment:
    data = text.encode()
    return Segment(zlib.crc32(data) << 32 | len(data), max(1, len(data) // BYTES_PER_TOKEN))


def _mooncake(path: Path, text: str, limit: int | None, speed: float) -> list[TraceRequest]:
    requests = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if limit is not None and len(requests) >= limit:
            break
        try:
            requests.append(_mooncake_request(json.loads(line), len(requests), speed))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path} line {number} is no Mooncake entry (timestamp, input_length, output_length, hash_ids): "
                f"{error!r}"
            ) from error
    return requests


def _mooncake_request(entry: dict[str, Any], number: int, speed: float) -> TraceRequest:
    length, output_len = int(entry["input_length"]), int(entry["output_length"])
    if length < 1 or output_len < 0:
        raise ValueError(f"lengths {length} and {output_len}")
    blocks = [int(block) for block in entry["hash_ids"]]
    if len(blocks) != -(-length // MOONCAKE_BLOCK):
        raise ValueError(f"{len(blocks)} hash ids for {length} tokens")
    counts = [MOONCAKE_BLOCK] * (len(blocks) - 1) + [length - MOONCAKE_BLOCK * (len(blocks) - 1)]
    prompt = tuple(Segment(block, count) for block, count in zip(blocks, counts, strict=True))
    return TraceRequest(float(entry["timestamp"]) / 1000 / speed, prompt, max(output_len, 1), (1 << 63) + number)
