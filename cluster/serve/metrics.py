"""What GET /metrics answers: Prometheus' text format, named as vLLM names its metrics, with our prefix.

An engine measures queues, prefill, decode, steps and memory; an ingress what a client sees: time to first token,
between tokens, and to the end. Whichever ingress is asked answers for all replicas of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

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
    ("outstanding_tokens", "Tokens of work of open requests, as the router counts them.", "outstanding"),
    ("kv_cache_pages", "KV pages of the pool.", "total_pages"),
    ("kv_cache_free_pages", "KV pages that hold nothing.", "free_pages"),
    ("kv_cache_cached_pages", "KV pages in the prefix cache.", "cached_pages"),
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
_INGRESS_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From arrival to the first token.", "first_token"),
    ("inter_token_latency_seconds", "Between a stream's tokens.", "between_tokens"),
    ("e2e_request_latency_seconds", "From a request's arrival to its end.", "end_to_end"),
)
Labelled = list[tuple[dict[str, str], Any]]  # a value for each set of labels


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

    def snapshot(self) -> dict[str, Any]:
        """All of it as plain values: for the ingress that is asked for the metrics of all."""
        return {
            "first_token": self.first_token.snapshot(),
            "between_tokens": self.between_tokens.snapshot(),
            "end_to_end": self.end_to_end.snapshot(),
            "finished": dict(self.finished),
            "resubmitted": self.resubmitted,
        }


class ModelMetrics(NamedTuple):
    """One model: what every ingress (`IngressMetrics.snapshot`) and every engine (its stats and metrics) that answers
    has measured, by the replica's id."""

    name: str
    ingresses: dict[str, dict[str, Any]]
    engines: dict[str, dict[str, Any]]


def render(models: Iterable[ModelMetrics]) -> bytes:
    """The text of /metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(list(models)))
    return generate_latest(registry)


class _Snapshot(Collector):
    """The metrics of one scrape. A replica's values carry its id, so that sums and rates stay right as replicas come
    and go."""

    def __init__(self, models: Sequence[ModelMetrics]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        up = [({"model_name": model.name}, len(model.engines)) for model in self._models]
        yield self._gauge("engine_up", "Engines that answer.", up)
        yield from self._of_engines(_labelled("replica", [(model.name, model.engines) for model in self._models]))
        yield from self._of_ingresses(_labelled("ingress", [(model.name, model.ingresses) for model in self._models]))

    def _of_ingresses(self, ingresses: Labelled) -> Iterator[Metric]:
        for name, text, key in _INGRESS_HISTOGRAMS:
            yield self._histogram(name, text, [(labels, ingress[key]) for labels, ingress in ingresses])
        ended = [
            (labels | {"finished_reason": reason}, count)
            for labels, ingress in ingresses
            for reason, count in sorted(ingress["finished"].items())
        ]
        yield self._counter("request_success", "Streams that ended, by reason.", ended)
        again = [(labels, ingress["resubmitted"]) for labels, ingress in ingresses]
        yield self._counter("resubmitted_streams", "Times that a stream lost its engine.", again)

    def _of_engines(self, engines: Labelled) -> Iterator[Metric]:
        for name, text, key in _GAUGES:
            yield self._gauge(name, text, [(labels, engine[key]) for labels, engine in engines])
        usage = [(labels, _used_pages(engine) / engine["total_pages"]) for labels, engine in engines]
        yield self._gauge("kv_cache_usage_perc", "Share of KV pages in use by requests (1: all).", usage)
        queries = [(labels, engine["cached_tokens"] + engine["prefilled_tokens"]) for labels, engine in engines]
        yield self._counter("prefix_cache_queries", "Input tokens looked up in the prefix cache.", queries)
        for name, text, key in _COUNTERS:
            yield self._counter(name, text, [(labels, engine[key]) for labels, engine in engines])
        for name, text, key in _ENGINE_HISTOGRAMS:
            yield self._histogram(name, text, [(labels, engine[key]) for labels, engine in engines])

    @staticmethod
    def _gauge(name: str, text: str, values: Labelled) -> Metric:
        return _filled(GaugeMetricFamily, name, text, values)

    @staticmethod
    def _counter(name: str, text: str, values: Labelled) -> Metric:
        return _filled(CounterMetricFamily, name, text, values)

    @staticmethod
    def _histogram(name: str, text: str, snapshots: Labelled) -> Metric:
        metric = HistogramMetricFamily(PREFIX + name, text, labels=list(snapshots[0][0]) if snapshots else [])
        for labels, snapshot in snapshots:
            total, buckets = 0, []
            for bound, count in zip([*snapshot["bounds"], "+Inf"], snapshot["counts"], strict=True):
                total += count
                buckets.append((str(bound), total))
            metric.add_metric(list(labels.values()), buckets, snapshot["sum"])
        return metric


def _labelled(kind: str, models: Sequence[tuple[str, dict[str, Any]]]) -> Labelled:
    return [({"model_name": model, kind: name}, each) for model, found in models for name, each in found.items()]


def _filled(kind: type[Metric], name: str, text: str, values: Labelled) -> Metric:
    metric = kind(PREFIX + name, text, labels=list(values[0][0]) if values else [])
    for labels, value in values:
        metric.add_metric(list(labels.values()), value)
    return metric


def _used_pages(engine: dict[str, Any]) -> int:
    return engine["total_pages"] - engine["free_pages"] - engine["evictable_pages"]
