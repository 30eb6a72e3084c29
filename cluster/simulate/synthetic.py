"""Made-up traces: Poisson arrivals, chosen length distributions, shared prefixes and conversations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.errors import ConfigError
from cluster.simulate.tokens import Segment
from cluster.simulate.traces import Trace, TraceRequest, session_starts


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts of at least 1.

    `N` is always N; `uniform:A:B` is in A..B, both included; `exp:MEAN`; `lognormal:MEAN:SIGMA`, where sigma is that
    of the logarithm (0.5: mild, 1: chat traces, 1.5: long tail).
    """

    kind: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises ConfigError for anything else than the forms above."""
        kind, _, rest = text.partition(":")
        if not rest:
            kind, rest = "constant", text
        try:
            values = tuple(float(part) for part in rest.split(":"))
        except ValueError:
            values = ()
        expected = {"constant": 1, "uniform": 2, "exp": 1, "lognormal": 2}.get(kind)
        if len(values) != expected or values[0] < 1 or (kind == "uniform" and values[1] < values[0]):
            raise ConfigError(
                f"{text!r} is no length distribution; use N, uniform:A:B, exp:MEAN or lognormal:MEAN:SIGMA, "
                "with lengths of at least 1"
            )
        return cls(kind, values)

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        first, *more = self.values
        if self.kind == "constant":
            drawn = np.full(count, first)
        elif self.kind == "uniform":
            drawn = rng.integers(int(first), int(more[0]) + 1, count)
        elif self.kind == "exp":
            drawn = rng.exponential(first, count)
        else:
            drawn = rng.lognormal(np.log(first) - more[0] ** 2 / 2, more[0], count)
        return np.maximum(1, np.round(drawn)).astype(int).tolist()


@dataclass(frozen=True)
class SyntheticSpec:
    """`requests` in sessions of `turns`; a turn's prompt is all that was said before and `prompt` new tokens.

    rate          requests per second; infinite: all sessions start at once
    prefix_len    tokens that the first prompts of a group of sessions begin with, in each of `prefix_groups` groups
    prefix_share  share of sessions that belong to a group; the others begin with as many tokens of their own
    think_time    mean seconds between an answer's end and the next turn (exponential)
    users         requests are spread over so many user keys; 0: none
    """

    requests: int
    rate: float
    prompt: Lengths
    output: Lengths
    prefix_len: int = 0
    prefix_groups: int = 1
    prefix_share: float = 1.0
    turns: int = 1
    think_time: float = 5.0
    users: int = 0
    seed: int = 0


def synthetic_trace(spec: SyntheticSpec) -> Trace:
    """The same trace for the same spec, on every machine."""
    rng = np.random.default_rng(spec.seed)
    sessions = -(-spec.requests // spec.turns)
    starts = session_starts(sessions, spec.rate / spec.turns, rng).tolist()
    groups = rng.integers(0, spec.prefix_groups, sessions).tolist()
    prompts = spec.prompt.draw(sessions * spec.turns, rng)
    outputs = spec.output.draw(sessions * spec.turns, rng)
    pauses = rng.exponential(spec.think_time, sessions * spec.turns).tolist()
    prefix_keys = rng.integers(0, 2**63, spec.prefix_groups).tolist()
    keys = rng.integers(0, 2**63, (sessions * spec.turns, 2)).tolist()
    alone = (rng.random(sessions) >= spec.prefix_share).tolist()
    own_prefixes = rng.integers(0, 2**63, sessions).tolist()
    requests: list[TraceRequest] = []
    for session in range(sessions):
        prefix = own_prefixes[session] if alone[session] else prefix_keys[groups[session]]
        prompt = (Segment(prefix, spec.prefix_len),) if spec.prefix_len else ()
        user = f"user{session % spec.users}" if spec.users else None
        for turn in range(spec.turns):
            number = len(requests)
            if number == spec.requests:
                break
            question, answer = keys[number]
            prompt = (*prompt, Segment(question, prompts[number]))
            when, after = (pauses[number], number - 1) if turn else (starts[session], None)
            requests.append(TraceRequest(when, prompt, outputs[number], answer, after, user))
            prompt = (*prompt, Segment(answer, outputs[number]))
    return Trace("synthetic", requests)
