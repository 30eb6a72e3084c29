"""Ray side of raydix: placement, transport, driver, `LLM`, Serve and the command line.

Names are imported when first used, so that a worker process does not load what only the driver needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.config import EngineConfig
    from cluster.llm import LLM, RequestOutput
    from scheduler.sampling_params import SamplingParams
    from scheduler.structured_outputs import StructuredOutputs

__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams", "StructuredOutputs"]

_HOMES = {
    "EngineConfig": "cluster.config",
    "LLM": "cluster.llm",
    "RequestOutput": "cluster.llm",
    "SamplingParams": "scheduler.sampling_params",
    "StructuredOutputs": "scheduler.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
