"""`EngineCall`: what an ingress asks of an engine, as one `bytes` argument of a Serve call.

Ray serialises each argument of a call apart, name and value, and pickles what is not a plain value in Python: for
these it took as long as the rest of the call's way through this process.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np

from cluster.serve.side_channel import ReplyAddress
from scheduler.sampling_params import SamplingParams


@dataclass(frozen=True)
class EngineCall:
    """One stream of tokens.

    address        where they go, marked with `stream_id`
    prompt_ids     int32: the prompt, and what was generated before
    priority, user, prompt_len   see `scheduler.request.Request`
    """

    address: ReplyAddress
    stream_id: int
    prompt_ids: np.ndarray
    sampling: SamplingParams
    priority: int = 0
    user: str | None = None
    prompt_len: int | None = None

    def encode(self) -> bytes:
        """Calls travel through Ray, which unpickles its arguments as well; nothing from a socket of ours is."""
        ids = self.prompt_ids.astype("<i4", copy=False).tobytes()
        parts = (self.address, self.stream_id, ids, self.sampling, self.priority, self.user, self.prompt_len)
        return pickle.dumps(parts, pickle.HIGHEST_PROTOCOL)

    @classmethod
    def decode(cls, data: bytes) -> EngineCall:
        address, stream_id, ids, *rest = pickle.loads(data)
        return cls(address, stream_id, np.frombuffer(ids, "<i4"), *rest)
