"""Programmatic dependent launch: a kernel starts while the one before it still runs, up to its first `gdc_wait`.

Kernels that are launched with these options call `gdc_wait` before they touch anything an earlier kernel wrote, and let
their successor start at once. Between the two they may fetch weights, which no kernel writes. Hopper and newer.
"""

from __future__ import annotations

from functools import cache

import torch

_OFF = {"PDL": False}
_ON = {"PDL": True, "launch_pdl": True}


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch options for a kernel with a `PDL` constant, on `device`."""
    return _ON if device.type == "cuda" and _supported(device.index) else _OFF


@cache
def _supported(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9
