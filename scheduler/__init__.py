"""Requests, batches and the step message: everything the driver decides. No torch, no ray."""

from scheduler.cache_manager import CacheManager
from scheduler.config import SchedulerConfig
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.request import InvalidRequest, Req, Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler, SchedulerStats
from scheduler.step import StepFormatError, StepPlan, StepResult

__all__ = [
    "CacheManager",
    "FinishReason",
    "InvalidRequest",
    "Req",
    "Request",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "StepFormatError",
    "StepOutputs",
    "StepPlan",
    "StepResult",
]
