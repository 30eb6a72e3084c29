"""What users would have seen: first tokens, gaps between tokens, ends; and what it cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from scheduler.outputs import FinishReason, StepOutputs

PERCENTILES = (50, 90, 99)


class Recorder:
    """Times of every request of one run, in seconds, filled in as outputs come. Request ids are places in the trace."""

    def __init__(self, num_requests: int) -> None:
        self.arrival = np.full(num_requests, np.nan)
        self.first_token = np.full(num_requests, np.nan)
        self.last_token = np.full(num_requests, np.nan)
        self.tokens = np.zeros(num_requests, dtype=np.int64)
        self.finish = np.zeros(num_requests, dtype=np.uint8)
        self.cached_tokens = np.zeros(num_requests, dtype=np.int64)
        self._gaps: list[np.ndarray] = []
        self._ended: list[tuple[float, int]] = []

    def record(self, time: float, outputs: StepOutputs) -> None:
        """Outputs that reached their users at `time`."""
        ids = outputs.request_ids
        if not len(ids):
            return
        if outputs.finish.any():
            over = outputs.finish != FinishReason.NONE
            self.finish[ids[over]] = outputs.finish[over]
            self._ended += [(time, number) for number in ids[over].tolist()]
        if outputs.step_id == 0:  # ended without a step: no token
            return
        with_token = outputs.tokens >= 0
        if not with_token.all():
            ids = ids[with_token]
        gaps = time - self.last_token[ids]
        new = np.isnan(gaps)
        if new.any():
            starting = ids[new]
            self.first_token[starting] = time
            self.cached_tokens[starting] = outputs.cached_tokens[with_token][new]
            gaps = gaps[~new]
        self._gaps.append(gaps)
        self.last_token[ids] = time
        self.tokens[ids] += 1

    def take_from(self, other: Recorder) -> None:
        """Add another recorder's requests, which are none of this one's."""
        theirs = ~np.isnan(other.arrival)
        for name in ("arrival", "first_token", "last_token", "tokens", "finish", "cached_tokens"):
            getattr(self, name)[theirs] = getattr(other, name)[theirs]
        self._gaps += other._gaps

    def take_ended(self) -> list[tuple[float, int]]:
        """(time, request) of those that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def first_token_latency(self) -> np.ndarray:
        """Seconds from arrival to first token, of the requests that got one."""
        latency = self.first_token - self.arrival
        return latency[~np.isnan(latency)]

    @property
    def inter_token_latency(self) -> np.ndarray:
        """Seconds between neighbouring tokens of a request, all pooled, ascending."""
        return np.sort(np.concatenate(self._gaps)) if self._gaps else np.empty(0)


@dataclass(frozen=True)
class Totals:
    """Sums over the schedulers of a run."""

    prefilled_tokens: int
    cached_tokens: int
    preemptions: int
    steps: int

    @classmethod
    def sum(cls, parts: Iterable[Totals]) -> Totals:
        return cls(*(sum(column) for column in zip(*(astuple(part) for part in parts), strict=True)))


@dataclass(frozen=True)
class RunResult:
    """One simulated (or measured) run.

    series        float64[samples, 5]: time, waiting, running, cached and prefilled input tokens so far
    refused       requests that no engine of this configuration can serve, and those that were to follow them
    real_seconds  what the simulation itself took
    """

    label: str
    recorder: Recorder
    totals: Totals
    series: np.ndarray
    refused: int
    gpus: int
    real_seconds: float

    def summary(self) -> dict[str, Any]:
        """Plain numbers: seconds, tokens, tokens per second. Latencies are None when nothing was generated."""
        recorder, totals = self.recorder, self.totals
        finished = (recorder.finish == FinishReason.LENGTH) | (recorder.finish == FinishReason.STOP)
        tokens = int(recorder.tokens.sum())
        seconds = float(np.nanmax(recorder.last_token) - np.nanmin(recorder.arrival)) if tokens else 0.0
        input_tokens = totals.prefilled_tokens + totals.cached_tokens
        rate = 1 / seconds if seconds else 0.0
        return {
            "requests": len(recorder.finish),
            "finished": int(finished.sum()),
            "failed": int(np.isin(recorder.finish, (FinishReason.ERROR, FinishReason.INVALID)).sum()),
            "refused": self.refused,
            "seconds": seconds,
            "output_tokens": tokens,
            "output_tokens_per_s": tokens * rate,
            "input_tokens_per_s": input_tokens * rate,
            "requests_per_s": float(finished.sum()) * rate,
            "output_tokens_per_s_per_gpu": tokens * rate / self.gpus,
            "ttft_s": spread(recorder.first_token_latency),
            "itl_s": spread(recorder.inter_token_latency),
            "e2e_s": spread((recorder.last_token - recorder.arrival)[finished]),
            "hit_rate": totals.cached_tokens / input_tokens if input_tokens else 0.0,
            "prefilled_tokens": totals.prefilled_tokens,
            "cached_tokens": totals.cached_tokens,
            "preemptions": totals.preemptions,
            "steps": totals.steps,
            "gpus": self.gpus,
            "real_seconds": self.real_seconds,
        }


def spread(values: np.ndarray) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None of nothing."""
    if not len(values):
        return None
    percentiles = zip(PERCENTILES, np.percentile(values, PERCENTILES).tolist(), strict=True)
    return {"mean": float(values.mean())} | {f"p{p}": value for p, value in percentiles} | {"max": float(values.max())}
