"""Seconds of a step from its shape: what it computes and what it has to read.

`RooflineCost` takes a card's data sheet. With F = FLOP/s and B = bytes/s of all ranks together, each times the share
of it that good kernels reach::

    launch     FIXED + layers x PER_LAYER                            what many small kernels cost even when empty
    linear     max(2 x body x tokens / F, weight bytes / B)          every weight once per step
    head       max(2 x head x samples / F, head bytes / B)
    decode     max(4 x layers x q_width x context / F, K/V bytes of the context / B)
    prefill    max(4 x layers x q_width x pairs / F, K/V bytes of the context / B)     pairs: (query, key) attended
    all-reduce 2 x layers x (LATENCY + 2 (n - 1) / n x tokens x hidden x bytes / link)  for n > 1 ranks

`CalibratedCost` is linear in the same quantities, with coefficients fitted to measured steps; the time over the number
of tokens is piecewise linear, since small batches read weights and large ones compute.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from cluster.bench.limits import BYTES, GPUS, ModelCost
from cluster.errors import ConfigError
from scheduler.step import StepPlan

# Shares of the data sheet that kernels reach, and costs beside it. Estimates from public engines on one H200: Llama 8B
# decodes a token in 4.9 ms (0.91 of bandwidth and 30 us a layer), and prefills at 0.63 of the peak.
BANDWIDTH_SHARE = 0.9
FLOPS_SHARE = 0.63
FIXED_SECONDS = 2e-4
PER_LAYER_SECONDS = 2.5e-5
HOST_SECONDS = 3e-4  # driver: plan, send, receive; hidden by the step in flight unless overlap is off
ALL_REDUCE_LATENCY = 1e-5
CALIBRATION_VERSION = 1


class StepShape(NamedTuple):
    """What decides how long a step takes. Counts of live entries; padding is not counted.

    tokens           input tokens
    decodes          decode entries
    prefills         prefill entries
    samples          tokens sampled
    decode_context   sum of decode entries' lengths: K/V read for them
    prefill_context  sum of prefill entries' lengths
    pairs            (query, key) pairs that prefill entries attend, causally
    """

    tokens: int
    decodes: int
    prefills: int
    samples: int
    decode_context: int
    prefill_context: int
    pairs: int

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        n, d = plan.num_rows, plan.num_decode
        context = int(plan.device_len[:d].sum(dtype=np.int64))
        if n == d:
            return cls(plan.num_tokens, d, 0, plan.num_samples, context, 0, 0)
        length = plan.device_len[d:n].astype(np.int64)
        extend = length - plan.cached_len[d:n]
        pairs = int((extend * (length - extend) + extend * (extend + 1) // 2).sum())
        return cls(plan.num_tokens, d, n - d, plan.num_samples, context, int(length.sum()), pairs)


class StepCost(Protocol):
    """A cost model. `host_seconds` pass between a result and the next step, unless one is in flight already."""

    host_seconds: float

    def seconds(self, shape: StepShape) -> float: ...


@dataclass(frozen=True)
class Card:
    """One GPU: bytes of memory, bytes/s and dense 16-bit FLOP/s, and bytes/s to its peers one way (data sheets)."""

    name: str
    memory: float
    bandwidth: float
    peak: float
    link: float


_MEMORY_AND_LINK = {
    "H200": (141e9, 450e9), "H100": (80e9, 450e9), "H100 PCIe": (80e9, 64e9), "A100-SXM4-80GB": (80e9, 300e9),
}  # fmt: skip
CARDS = {name: Card(name, _MEMORY_AND_LINK[name][0], *GPUS[name], _MEMORY_AND_LINK[name][1]) for name in GPUS}


class ModelShape(NamedTuple):
    """Sizes of a dense decoder, from its config.json."""

    cost: ModelCost
    hidden: int
    kv_heads: int
    vocab_size: int
    max_seq_len: int
    tied: bool

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelShape:
        return cls(
            ModelCost.from_config(config),
            config["hidden_size"],
            config.get("num_key_value_heads", config["num_attention_heads"]),
            config["vocab_size"],
            config["max_position_embeddings"],
            config.get("tie_word_embeddings", False),
        )


class RooflineCost:
    """`tp_size` cards that share one model; see the module's formulas."""

    def __init__(self, model: ModelShape, card: Card, tp_size: int = 1, dtype: str = "bfloat16") -> None:
        self.host_seconds = HOST_SECONDS
        self._cost, self._hidden = model.cost, model.hidden
        self._bytes = BYTES[dtype]
        self._tp_size, self._card = tp_size, card
        self._flops = tp_size * card.peak * FLOPS_SHARE
        self._bandwidth = tp_size * card.bandwidth * BANDWIDTH_SHARE
        copies = max(1.0, tp_size / model.kv_heads)  # more ranks than K/V heads: each head is held several times
        self._kv_bytes = model.cost.kv_width * self._bytes * copies
        self._weights = (model.cost.body + model.cost.head * (1 if model.tied else 2)) * self._bytes
        self._launch = FIXED_SECONDS + model.cost.layers * PER_LAYER_SECONDS

    def seconds(self, shape: StepShape) -> float:
        cost, flops, bandwidth = self._cost, self._flops, self._bandwidth
        attention = 4 * cost.layers * cost.query_width / flops
        kv = self._kv_bytes / bandwidth
        total = self._launch + max(2 * cost.body * shape.tokens / flops, cost.body * self._bytes / bandwidth)
        total += max(attention, kv) * shape.decode_context
        if shape.prefills:
            total += max(attention * shape.pairs, kv * shape.prefill_context)
        if shape.samples:
            total += max(2 * cost.head * shape.samples / flops, cost.head * self._bytes / bandwidth)
        if self._tp_size > 1:
            moved = 2 * (self._tp_size - 1) / self._tp_size * shape.tokens * self._hidden * self._bytes
            total += 2 * cost.layers * (ALL_REDUCE_LATENCY + moved / self._card.link)
        return total

    def num_pages(self, page_size: int, memory_utilization: float = 0.9) -> int:
        """KV pages that fit beside the weights and 2 GB a card for activations and the runtime.

        Raises:
            ConfigError: the weights alone do not fit.
        """
        room = self._tp_size * (self._card.memory * memory_utilization - 2e9) - self._weights
        pages = int(room / (self._kv_bytes * page_size))
        if pages < 1:
            raise ConfigError(
                f"weights of {self._weights / 1e9:.0f} GB do not fit on {self._tp_size} x {self._card.name} "
                f"({self._card.memory / 1e9:.0f} GB each); raise --tp-size"
            )
        return pages


TERMS = ("decodes", "prefills", "samples", "decode_context", "prefill_context", "pairs")


@dataclass(frozen=True)
class CalibratedCost:
    """Seconds = f(tokens) + the sum of `per[term]` x shape.term; f is linear between `knots` and beyond the last.

    `model`, `machine` and `fit` (errors of the fit) are for the reader; `vocab_size` and `page_size` are the ones
    measured with.
    """

    model: str
    machine: str
    vocab_size: int
    page_size: int
    knots: list[tuple[int, float]]
    per: dict[str, float]
    host_seconds: float
    fit: dict[str, float]

    def seconds(self, shape: StepShape) -> float:
        return self._by_tokens(shape.tokens) + sum(self.per[term] * getattr(shape, term) for term in TERMS)

    def _by_tokens(self, tokens: int) -> float:
        (x0, y0), (x1, y1) = self.knots[0], self.knots[1]
        for i in range(1, len(self.knots)):
            (x0, y0), (x1, y1) = self.knots[i - 1], self.knots[i]
            if tokens <= x1:
                break
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"version": CALIBRATION_VERSION} | asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> CalibratedCost:
        """Raises ConfigError if the file is not a calibration of this version."""
        try:
            values = json.loads(path.read_text())
            if values.pop("version") != CALIBRATION_VERSION:
                raise ValueError("another version")
            values["knots"] = [(int(x), float(y)) for x, y in values["knots"]]
            calibrated = cls(**values)
            if len(calibrated.knots) < 2 or set(calibrated.per) != set(TERMS):
                raise ValueError("knots or coefficients are missing")
            return calibrated
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{path} is no calibration file: {error}; write one with `raydix simulate --calibrate {path}`"
            ) from error
