"""What GET /metrics answers: Prometheus' text format, named as vLLM names its metrics, with our prefix.

The engine measures queues, prefill, decode, steps and memory; the ingress what a client sees: time to first token,
between tokens, and to the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cluster.histogram import FIRST_TOKEN_BOUNDS, REQUEST_BOUNDS, TOKEN_BOUNDS, Histogram

PREFIX = "raydix_"

# name, help, key in the engine's answer
_GAUGES = (
    ("num_requests_running", "Requests that have a row.", "running"),
    ("num_requests_waiting", "Requests in line.", "waiting"),
)
_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of requests that got a first token.", "prompt_tokens"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("prefix_cache_hits", "Input tokens that came from the prefix cache.", "cached_tokens"),
    ("num_preemptions", "Requests that had to give their row back.", "preemptions"),
    ("recoveries", "Times the ranks were replaced while requests were running.", "recoveries"),
    ("integrity_violations", "Times the KV cache was found corrupted, and emptied.", "integrity_violations"),
    ("steps", "Steps planned.", "steps"),
)
_ENGINE_HISTOGRAMS = (
    ("request_queue_time_seconds", "From submission to the first admission.", "queue_seconds"),
    ("request_prefill_time_seconds", "From the first admission to the first token.", "prefill_seconds"),
    ("request_decode_time_seconds", "From the first token to the last.", "decode_seconds"),
    ("step_time_seconds", "From when a step could begin to its result.", "step_seconds"),
)


class IngressMetrics:
    """What this ingress measures. The receiving thread calls `tokens`, the event loop `ended`."""

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS)
        self.between_tokens = Histogram(TOKEN_BOUNDS)
        self.end_to_end = Histogram(REQUEST_BOUNDS)
        self.finished: Counter[str] = Counter()
        self.resubmitted = 0  # times that a stream was sent to an engine again

    def tokens(self, first: list[float], later: list[float]) -> None:
        """One step: seconds from arrival of streams that got their first token, and between tokens of the others."""
        self.first_token.observe_many(first)
        self.between_tokens.observe_many(later)

    def ended(self, seconds: float, reason: str) -> None:
        """A stream ended after this time; `reason`: stop, length, abort (the client left) or error."""
        self.end_to_end.observe(seconds)
        self.finished[reason] += 1


def render(model: str, ingress: IngressMetrics, engine: dict[str, Any] | None) -> bytes:
    """The text of /metrics. `engine`: its stats and metrics; None if it does not answer."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(model, ingress, engine))
    return generate_latest(registry)


class _Snapshot(Collector):
    """The metrics of one scrape."""

    def __init__(self, model: str, ingress: IngressMetrics, engine: dict[str, Any] | None) -> None:
        self._labels = {"model_name": model}
        self._ingress = ingress
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("engine_up", "1 while the engine answers.", float(self._engine is not None))
        if self._engine is not None:
            yield from self._of_engine(self._engine)
        ingress = self._ingress
        yield self._histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token.",
            ingress.first_token.snapshot(),
        )
        yield self._histogram(
            "inter_token_latency_seconds", "Between a stream's tokens.", ingress.between_tokens.snapshot()
        )
        yield self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", ingress.end_to_end.snapshot()
        )
        finished = CounterMetricFamily(
            PREFIX + "request_success", "Streams that ended, by reason.", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in sorted(ingress.finished.items()):
            finished.add_metric([*self._labels.values(), reason], count)
        yield finished
        yield self._counter("resubmitted_streams", "Times that a stream lost its engine.", ingress.resubmitted)

    def _of_engine(self, engine: dict[str, Any]) -> Iterator[Metric]:
        for name, text, key in _GAUGES:
            yield self._gauge(name, text, engine[key])
        used = engine["total_pages"] - engine["free_pages"] - engine["evictable_pages"]
        yield self._gauge(
            "kv_cache_usage_perc", "Share of KV pages in use by requests (1: all).", used / engine["total_pages"]
        )
        yield self._gauge("kv_cache_pages", "KV pages of the pool.", engine["total_pages"])
        yield self._gauge("kv_cache_free_pages", "KV pages that hold nothing.", engine["free_pages"])
        yield self._gauge("kv_cache_cached_pages", "KV pages in the prefix cache.", engine["cached_pages"])
        queries = engine["cached_tokens"] + engine["prefilled_tokens"]
        yield self._counter("prefix_cache_queries", "Input tokens looked up in the prefix cache.", queries)
        for name, text, key in _COUNTERS:
            yield self._counter(name, text, engine[key])
        for name, text, key in _ENGINE_HISTOGRAMS:
            yield self._histogram(name, text, engine[key])

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        metric = GaugeMetricFamily(PREFIX + name, text, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric

    def _counter(self, name: str, text: str, value: float) -> Metric:
        metric = CounterMetricFamily(PREFIX + name, text, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric

    def _histogram(self, name: str, text: str, snapshot: dict[str, Any]) -> Metric:
        metric = HistogramMetricFamily(PREFIX + name, text, labels=list(self._labels))
        total, buckets = 0, []
        for bound, count in zip([*snapshot["bounds"], "+Inf"], snapshot["counts"], strict=True):
            total += count
            buckets.append((str(bound), total))
        metric.add_metric(list(self._labels.values()), buckets, snapshot["sum"])
        return metric
