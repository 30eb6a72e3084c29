"""A histogram whose cost per value is that of numpy: what metrics are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# upper bounds in seconds; what is larger goes into a last, open bucket
STEP_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
TOKEN_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
FIRST_TOKEN_BOUNDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REQUEST_BOUNDS = (0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """Counts of values by bucket, and their sum. One thread writes; any thread may take a snapshot.

    `bounds`: upper bounds of the buckets, inclusive and rising.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[self._bounds.searchsorted(value)] += 1
        self._sum += value

    def observe_many(self, values: Sequence[float]) -> None:
        """Count several values in a fixed number of numpy calls."""
        if len(values):
            values = np.asarray(values)
            self._counts += np.bincount(self._bounds.searchsorted(values), minlength=len(self._counts))
            self._sum += float(values.sum())

    def snapshot(self) -> dict[str, Any]:
        """`bounds`, `counts` (one more than bounds, not cumulative) and `sum`, as plain values."""
        return {"bounds": self._bounds.tolist(), "counts": self._counts.tolist(), "sum": self._sum}
