"""Steps as captured CUDA graphs: forward graphs of decode steps and of small mixed steps, and samplers behind both."""

from __future__ import annotations

from worker.graphs.recorder import Recorder
from worker.graphs.steps import GraphSizes, StepGraphs

__all__ = ["GraphSizes", "Recorder", "StepGraphs"]
