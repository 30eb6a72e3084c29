"""Answers that take long to write: with log probabilities of many tokens, or many tokens' ids. They are made in a
thread, whose every step is short: one call of a JSON encoder holds the GIL as long as it takes, in a thread as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response

from cluster.serve.answers import Sparse
from cluster.serve.sse import to_json
from cluster.serve.token_stream import ScoredToken
from scheduler.step import LogprobBlock

LARGE = 2048  # values: so many take some 10 ms as log probabilities, with their tokens' texts
PIECE = 32  # entries of a list that are encoded at once

Answer = TypeVar("Answer", bound=BaseModel)
T = TypeVar("T")


async def finished(make: Callable[[], Answer], size: int) -> Answer | Response:
    """The answer that `make` returns, of about `size` values; a large one as a response that is encoded already."""
    if size < LARGE:
        return make()
    return await asyncio.to_thread(lambda: Response(_json_bytes(make()), media_type="application/json"))


async def made(make: Callable[[], T], size: int) -> T:
    """What `make` returns, in a thread if it has many values."""
    return make() if size < LARGE else await asyncio.to_thread(make)


def num_scores(scored: Sequence[ScoredToken] | None, prompt: LogprobBlock | None) -> int:
    """Values in log probabilities, about: of generated tokens, and of a prompt's."""
    generated = len(scored) * scored[0].block.words.size if scored else 0
    return generated + (0 if prompt is None else prompt.words.size)


def json_text(value: Any) -> str:
    """Compact JSON of an answer, or of a part of one."""
    return "".join(_pieces(value))


def _json_bytes(value: Any) -> bytes:
    return b"".join([piece.encode() for piece in _pieces(value)])  # joins without the GIL, unlike texts


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        optional = value.optional if isinstance(value, Sparse) else ()
        yield from _members((name, each) for name, each in value if each is not None or name not in optional)
    elif isinstance(value, dict):
        yield from _members(value.items())
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for place, each in enumerate(value):
            yield "," if place else "["
            yield from _pieces(each)
        yield "]"
    elif isinstance(value, list):
        yield "["
        for place in range(0, len(value), PIECE):
            yield ("," if place else "") + to_json(value[place : place + PIECE])[1:-1]
        yield "]"
    else:
        yield to_json(value)


def _members(items: Iterable[tuple[str, Any]]) -> Iterator[str]:
    before = "{"
    for name, value in items:
        yield f"{before}{to_json(name)}:"
        yield from _pieces(value)
        before = ","
    yield "}" if before == "," else "{}"
