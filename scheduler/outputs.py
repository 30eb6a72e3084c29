"""What the scheduler hands to the side of the users: arrays, one entry per token or finish."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from scheduler.step import LogprobBlock, SampledLogprobs


class FinishReason(IntEnum):
    """Why a request ended; NONE: it goes on."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    POISON = 5  # an error: workers fail whenever it runs
    INVALID = 6  # an error that the request is the cause of: it outgrew the KV cache, or its grammar what is allowed


_NOTHING = tuple(np.empty(0, dtype) for dtype in (np.int64, np.int32, np.uint8, np.int32))


@dataclass(slots=True)
class StepOutputs:
    """New tokens and finishes, in a deterministic order. All arrays have one entry per element.

    A stop token is delivered (with STOP); the text side drops it. A request is named at most once, and never again
    after a finish other than NONE.
    """

    request_ids: np.ndarray  # int64
    tokens: np.ndarray  # int32; -1: no token with this entry
    finish: np.ndarray  # uint8, FinishReason
    cached_tokens: np.ndarray  # int32, prompt tokens found in the prefix cache at first admission
    step_id: int = 0  # 0: needed no step
    errors: dict[int, str] = field(default_factory=dict)  # request id -> message, for ERROR, POISON and INVALID
    logprobs: SampledLogprobs | None = None  # of the entries that it indexes, whose requests asked for them
    # By request id, once, with the first entry after the last prompt token was scored: of the prompt's tokens but the
    # first (a prompt of one token has none).
    prompt_logprobs: dict[int, LogprobBlock] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.request_ids)

    @classmethod
    def of_finished(
        cls, entries: list[tuple[int, FinishReason, int]], errors: dict[int, str] | None = None, step_id: int = 0
    ) -> StepOutputs:
        """Outputs without tokens from (request id, reason, cached tokens)."""
        if not entries:
            return cls(*_NOTHING, step_id, errors or {})
        columns = np.array(entries, dtype=np.int64).reshape(-1, 3)
        return cls(
            columns[:, 0].copy(), np.full(len(entries), -1, dtype=np.int32), columns[:, 1].astype(np.uint8),
            columns[:, 2].astype(np.int32), step_id, errors or {},
        )  # fmt: skip

    def extended(self, other: StepOutputs) -> StepOutputs:
        """Both, `self` first, under this step id. `other` has no log probabilities: it came with no result."""
        if not len(other):
            return self
        return StepOutputs(
            np.concatenate([self.request_ids, other.request_ids]),
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.finish, other.finish]),
            np.concatenate([self.cached_tokens, other.cached_tokens]),
            self.step_id,
            self.errors | other.errors,
            self.logprobs,
            self.prompt_logprobs,
        )
