"""Streams without end on one engine, each held against an undisturbed run, and how long recoveries make them pause."""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cluster.config import EngineConfig
from cluster.engine import Engine
from cluster.errors import EngineError
from cluster.recovery import Recovery
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams

VOCAB_SIZE = 101
TIE = 1e-4
CONFIG = {
    "device": "cpu",
    "tp_size": 2,
    "page_size": 4,
    "num_pages": 1500,
    "max_running_requests": 32,
    "max_seq_len": 256,
    "max_step_tokens": 128,
    "integrity_interval": 5,
    "ray_address": "auto",
    "max_recoveries": 100,
}
_GROUP = ("placement", "actors", "ranks")  # the driver's phases of a group's start
_RECREATE = ("placement", "actors", "connect", "import", "process group")


@dataclass
class Stream:
    """One run of one prompt."""

    number: int  # of the prompt
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish: FinishReason = FinishReason.NONE
    error: str | None = None


class Load:
    """Requests 2n are greedy and 2n + 1 seeded; each starts anew when it ends, until `drain`."""

    def __init__(
        self, model: Path, count: int = 32, seed: int = 0, lengths: tuple[int, int] = (80, 180), **config: object
    ) -> None:
        rng = random.Random(seed)
        self.prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(3, 60))] for _ in range(count)]
        self.lengths = [rng.randrange(*lengths) for _ in range(count)]
        self.ties = 0
        self.streams: dict[int, Stream] = {}
        self.failures: list[EngineError] = []
        self.changed = threading.Condition()
        self.began: float | None = None  # when the first of all requests was submitted
        self._ids = itertools.count(1)
        self._repeat = False
        self.engine = Engine(EngineConfig(model=str(model), **(CONFIG | config)), self._on_outputs, self._on_failure)

    def request(self, number: int, **sampling: object) -> Request:
        values = {"temperature": self.temperature(number), "seed": self.seed(number), "ignore_eos": True}
        values |= {"max_tokens": self.lengths[number]} | sampling
        return Request(next(self._ids), np.array(self.prompts[number]), SamplingParams(**values))

    @staticmethod
    def temperature(number: int) -> float:
        return 0.0 if number % 2 == 0 else 1.0

    @staticmethod
    def seed(number: int) -> int:
        return 1000 + number

    def submit(self, number: int, **sampling: object) -> Stream:
        request = self.request(number, **sampling)
        stream = self.streams[request.request_id] = Stream(number)
        self.began = self.began or time.monotonic()
        self.engine.submit(request)
        return stream

    def run_once(self) -> list[list[int]]:
        """Every prompt once, with nothing in the way."""
        streams = [self.submit(number) for number in range(len(self.prompts))]
        self.wait(lambda: all(stream.finish for stream in streams), 300)
        return [stream.tokens for stream in streams]

    def start(self) -> None:
        self._repeat = True
        for number in range(len(self.prompts)):
            self.submit(number)

    def drain(self) -> list[Stream]:
        """Let every stream end. Returns all that ever ran."""
        self._repeat = False
        self.wait(lambda: all(stream.finish for stream in self.streams.values()), 600)
        return list(self.streams.values())

    def live(self) -> list[Stream]:
        return [stream for stream in list(self.streams.values()) if not stream.finish]

    def wait(self, condition: Callable[[], bool], timeout: float = 300.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout), (self.failures, self.engine.recovering)

    def wait_for_tokens_everywhere(self, since: float) -> None:
        """Until every prompt's stream has got on since then."""
        numbers = set(range(len(self.prompts)))
        self.wait(
            lambda: {s.number for s in self.streams.values() if s.times and s.times[-1] > since} >= numbers, timeout=600
        )

    def check(self, expected: list[list[int]], gap: Callable[..., float] | None = None) -> int:
        """Every stream that ended has the undisturbed run's tokens. Returns how many there were.

        `gap(prefix, temperature, seed, one, other)`: how far apart two tokens' scores are; where that is at most `TIE`,
        a first difference is counted in `ties` instead.
        """
        assert not self.failures, self.failures
        for stream in self.streams.values():
            assert stream.finish == FinishReason.LENGTH, stream
            number, wanted = stream.number, expected[stream.number]
            if stream.tokens == wanted:
                continue
            assert gap is not None and len(stream.tokens) == len(wanted), f"prompt {number} differs"
            at = next(at for at, pair in enumerate(zip(stream.tokens, wanted, strict=True)) if pair[0] != pair[1])
            apart = gap(
                self.prompts[number] + wanted[:at],
                self.temperature(number),
                self.seed(number),
                stream.tokens[at],
                wanted[at],
            )
            assert apart <= TIE, f"prompt {number} differs at token {at}, by {apart}"
            self.ties += 1
        return len(self.streams)

    def _on_outputs(self, outputs: StepOutputs) -> None:
        now = time.monotonic()
        columns = (outputs.request_ids.tolist(), outputs.tokens.tolist(), outputs.finish.tolist())
        with self.changed:
            for request_id, token, finish in zip(*columns, strict=True):
                stream = self.streams[request_id]
                assert not stream.finish, "an output after the finish"
                if token >= 0:
                    stream.tokens.append(token)
                    stream.times.append(now)
                if finish:
                    stream.finish, stream.error = FinishReason(finish), outputs.errors.get(request_id)
                    if self._repeat:
                        self.submit(stream.number)
            self.changed.notify_all()

    def _on_failure(self, error: EngineError) -> None:
        with self.changed:
            self.failures.append(error)
            self.changed.notify_all()


@contextmanager
def running(load: Load) -> Iterator[Load]:
    load.engine.start()
    try:
        yield load
    finally:
        load.engine.shutdown()


@dataclass(frozen=True)
class ColdStart:
    """Seconds until the same group was ready for steps, in an idle Ray, and then until every stream had a token."""

    ready: float
    first_tokens: float

    @classmethod
    def of(cls, load: Load) -> ColdStart:
        """Of the engine's first run of every prompt, when none was in its prefix cache."""
        seconds = load.engine.info.startup_seconds
        first: dict[int, float] = {}
        for stream in load.streams.values():
            if stream.times:
                first.setdefault(stream.number, stream.times[0])
        return cls(sum(seconds.get(phase, 0.0) for phase in _GROUP), max(first.values()) - load.began)


@dataclass(frozen=True)
class Pause:
    """Seconds from a kill to the next token, in parts; of the streams that were open, the median and the worst.

    `spares`: spare ranks took over.
    """

    spares: bool
    detect: float
    tear_down: float
    recreate: float
    load: float
    prefill: float
    prefill_worst: float
    median: float
    worst: float

    @classmethod
    def of(cls, killed: float, recovery: Recovery, streams: list[Stream]) -> Pause:
        first = [next(time for time in stream.times if time > recovery.ready) for stream in streams]
        start = recovery.ready - recovery.stopped
        recreate = sum(recovery.phases.get(phase, 0.0) for phase in _RECREATE)
        return cls(
            "placement" not in recovery.phases,
            recovery.failed - killed,
            recovery.stopped - recovery.failed,
            min(recreate, start),
            max(0.0, start - recreate),
            statistics.median(first) - recovery.ready,
            max(first) - recovery.ready,
            statistics.median(first) - killed,
            max(first) - killed,
        )


def report(title: str, pauses: list[Pause], cold: ColdStart) -> str:
    """A table of medians and worsts."""
    lines = [f"{title}: {len(pauses)} recoveries; seconds"]
    for spares in (True, False):
        these = [pause for pause in pauses if pause.spares == spares]
        if these:
            how = "spare ranks took over" if spares else "before there were spare ranks: new processes"
            lines += [f"{len(these)} times {how}", f"{'':14}{'median':>8}{'worst':>8}"]
        for name in list(Pause.__dataclass_fields__)[1:] if these else ():
            values = [getattr(pause, name) for pause in these]
            lines.append(f"{name:14}{statistics.median(values):8.2f}{max(values):8.2f}")
    ready, until_token = cold.ready, cold.ready + cold.first_tokens
    lines.append(
        f"cold start of the same group: ready after {ready:.2f}, a token on every stream after {until_token:.2f}"
    )
    for limit, what in ((ready, "until ready"), (until_token, "until a token on every stream")):
        lines.append(f"whole pauses of at most a cold start {what}: {sum(p.worst <= limit for p in pauses)}")
    return "\n".join(lines)
