"""What an ingress asks arrives at the engine unchanged."""

from __future__ import annotations

import numpy as np

from cluster.curve import KeyPair
from cluster.serve.engine_call import EngineCall
from cluster.serve.side_channel import ReplyAddress
from scheduler.sampling_params import SamplingParams

ADDRESS = ReplyAddress("name", "node", "ipc:///x", "tcp://a:5", b"secret", b"key", KeyPair(b"public", b"private"))
SAMPLING = SamplingParams(
    seed=2**64 - 1,
    temperature=0.1,
    stop=["é", "b"],
    logit_bias={5: -1.5},
    structured_outputs={"json": {"type": "null"}},
)


def test_a_call_comes_out_as_it_went_in():
    call = EngineCall(ADDRESS, 2**39, np.array([1, 2**31 - 1], dtype=np.int32), SAMPLING, -3, "someone", 1)
    found = EngineCall.decode(call.encode())
    assert (found.address, found.stream_id, found.sampling) == (ADDRESS, 2**39, SAMPLING)
    assert (found.priority, found.user, found.prompt_len) == (-3, "someone", 1)
    assert found.prompt_ids.dtype == np.int32
    assert found.prompt_ids.tolist() == [1, 2**31 - 1]
