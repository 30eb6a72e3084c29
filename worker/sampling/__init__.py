"""Counter-based sampling with the vocabulary sharded over ranks."""

from worker.sampling.sampler import Sampler
from worker.sampling.state import SamplingMode, SamplingState

__all__ = ["Sampler", "SamplingMode", "SamplingState"]
