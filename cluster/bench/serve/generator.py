"""Sends sessions: each at its time whatever the server does (open loop), or so many side by side (closed loop)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from cluster.bench.serve.client import Call, Endpoint
from cluster.bench.serve.sessions import Session
from cluster.errors import ConfigError
from cluster.progress_bar import ProgressBar


@dataclass(frozen=True)
class Run:
    """Calls in the order of their ends. `started` and `ended`: `time.perf_counter()`; `cpu_seconds`: this process's.

    `skipped`: turns that were not sent since one before them failed.
    """

    calls: list[Call]
    started: float
    ended: float
    cpu_seconds: float
    skipped: int


async def send(endpoint: Endpoint, sessions: list[Session], concurrency: int | None, bar: ProgressBar) -> Run:
    """Send every session; with `concurrency` so many side by side, without each at its `start`.

    Latencies count from the moment of sending; `Call.due` tells when that should have been.
    """
    calls: list[Call] = []
    started, cpu = time.perf_counter(), time.process_time()

    async def play(number: int, session: Session, due: float) -> None:
        messages = list(session.opening)
        for index, turn in enumerate(session.turns):
            if index:
                due = time.perf_counter() + turn.pause
                await asyncio.sleep(turn.pause)
            messages.append(("user", turn.text))
            call = Call(number, index, due)
            await endpoint.run(call, messages, turn.output_len)
            calls.append(call)
            bar.finished(call.output_tokens)
            if call.error is not None:
                return
            messages.append(("assistant", call.text))

    async def at_its_time(number: int, session: Session) -> None:
        due = started + session.start
        await asyncio.sleep(due - time.perf_counter())
        await play(number, session, due)

    async def one_after_another() -> None:
        for number, session in numbered:
            await play(number, session, time.perf_counter())

    numbered = iter(enumerate(sessions))
    if concurrency is None:
        await asyncio.gather(*(at_its_time(number, session) for number, session in numbered))
    else:
        await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
    skipped = sum(len(session.turns) for session in sessions) - len(calls)
    return Run(calls, started, time.perf_counter(), time.process_time() - cpu, skipped)


async def warm_up(endpoint: Endpoint, sessions: list[Session], count: int) -> None:
    """The first turns of the last sessions, shortened to two tokens, one by one; they are not counted.

    Raises:
        ConfigError: the server refuses or fails one of them, so a run would measure nothing.
    """
    for session in sessions[-count:] if count else ():
        call = Call(0, 0, time.perf_counter())
        await endpoint.run(call, [*session.opening, ("user", session.turns[0].text)], 2)
        if call.error is not None:
            raise ConfigError(f"{endpoint.url} fails the first request: {call.error}")
