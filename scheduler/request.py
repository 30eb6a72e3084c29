"""Requests: what a caller submits (`Request`), and the scheduler's own record of one (`Req`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kvcache.base import CacheHandle
from scheduler.config import SchedulerConfig
from scheduler.constraint import Constraint
from scheduler.outputs import FinishReason
from scheduler.row_state import RowState
from scheduler.sampling_params import SamplingParams
from scheduler.step import LogprobBlock, sampling_entry


class InvalidRequest(ValueError):
    """A request that cannot be served as it is; the message names the value, the limit and a way out."""


@dataclass(slots=True, eq=False)
class Request:
    """One request as submitted.

    Args:
        request_id: the caller's number for it, unique among unfinished requests.
        prompt_ids: int32[n] (other integer sequences are converted). Holds the prompt and, when a request is resumed,
            the tokens it generated before.
        sampling: with `max_tokens` and `seed` filled in.
        priority: larger goes first under the priority policy.
        user: key of the fair-share policy.
        prompt_len: tokens of the prompt proper, from which `max_tokens` and `min_tokens` count; default all.
        admitted_at: `time.monotonic()` of the first admission, set by the scheduler.
        constraint: what the output must follow, at its beginning; the scheduler's from now on.
    """

    request_id: int
    prompt_ids: np.ndarray
    sampling: SamplingParams
    priority: int = 0
    user: str | None = None
    prompt_len: int | None = None
    admitted_at: float | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        ids = np.asarray(self.prompt_ids)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise InvalidRequest(f"prompt must be a flat list of token ids, got shape {ids.shape} of {ids.dtype}")
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 2**31):
            raise InvalidRequest(f"prompt token ids must lie in 0..2^31-1, got {ids.min()}..{ids.max()}")
        self.prompt_ids = np.ascontiguousarray(ids, dtype=np.int32)
        if self.prompt_len is None:
            self.prompt_len = len(ids)


class ReqState(IntEnum):
    """Where a request is. Only PREFILL and DECODE are planned; the rest with a row wait for results in flight."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    LAST = 3  # its last token is planned: it needs no more steps
    PREEMPTED = 4  # gives its row back when its results have returned, then waits again
    ENDED = 5  # its finish was reported
    HELD = 6  # waits, out of line, while only another request may run


class Req:
    """A request inside the scheduler: cold fields here, hot ones in its row's arrays, of which this is a view."""

    __slots__ = (
        "cached_prompt", "end_len", "handle", "has_extras", "ids", "passed_over", "private", "prompt_len",
        "prompt_scores", "request", "rows", "sampling_words", "scored", "sent_pages", "seq", "spoilt", "state",
        "stop_from", "stop_ids", "suppress_until", "table_idx",
    )  # fmt: skip

    def __init__(self, request: Request, seq: int, rows: RowState, eos_token_ids: tuple[int, ...]) -> None:
        sampling = request.sampling
        self.request = request
        self.seq = seq  # place in line: arrival order, kept for life
        self.rows = rows
        self.state = ReqState.WAITING
        self.table_idx = -1
        self.ids = request.prompt_ids  # known tokens while it has no row
        self.prompt_len = request.prompt_len
        self.end_len = request.prompt_len + sampling.max_tokens
        self.stop_ids = (() if sampling.ignore_eos else eos_token_ids) + tuple(sampling.stop_token_ids)
        self.stop_from = request.prompt_len + sampling.min_tokens  # first position that may get a stop token
        # Where workers have to be told: positions before this one must not get a stop token; 0: no such limit.
        self.suppress_until = self.stop_from if sampling.min_tokens and self.stop_ids else 0
        self.cached_prompt = -1  # prompt tokens found in the cache at first admission
        self.handle: CacheHandle | None = None  # locked while it has a row
        self.sent_pages = 0  # pages of the row that the workers' page table knows
        self.passed_over = 0  # younger requests that were admitted before it
        # Penalties, bias or log probabilities: the plans of its chunks carry optional sections.
        self.has_extras = (
            sampling.has_penalties
            or bool(sampling.logit_bias)
            or sampling.logprobs is not None
            or sampling.prompt_logprobs is not None
        )
        self.scored = 0  # prompt tokens, counted from the second, whose log probabilities have arrived
        self.prompt_scores: list[LogprobBlock] = []
        self.spoilt = False  # its K/V may hold NaN, and so may that of its prompt's beginning, which others share
        self.private = False  # its row neither takes nor gives cached prefixes while it is in prefill
        self.sampling_words = sampling_entry(
            row=0, temperature=sampling.temperature, top_p=sampling.top_p, min_p=sampling.min_p,
            top_k=max(sampling.top_k, 0), seed=sampling.seed, prompt_len=request.prompt_len,
        )  # fmt: skip

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def cached_len(self) -> int:
        """Tokens whose K/V is stored, or will be by the steps planned so far."""
        return int(self.rows.cached_len[self.table_idx])

    @property
    def device_len(self) -> int:
        """Tokens that exist after the next step's input, were it to take all of them."""
        return int(self.rows.device_len[self.table_idx])

    @property
    def extend_len(self) -> int:
        return self.device_len - self.cached_len

    @property
    def known_len(self) -> int:
        """Tokens the driver knows: prompt and returned results."""
        return len(self.ids) if self.table_idx < 0 else int(self.rows.known_len[self.table_idx])

    @property
    def input_ids(self) -> np.ndarray:
        """int32[known_len]."""
        return self.ids if self.table_idx < 0 else self.rows.tokens[self.table_idx, : self.known_len]

    @property
    def to_score(self) -> bool:
        """Whether prompt tokens are still without the log probabilities that were asked for."""
        return self.request.sampling.prompt_logprobs is not None and self.scored < self.prompt_len - 1

    @property
    def sharable_ids(self) -> np.ndarray:
        """The known tokens that may be served from the prefix cache: all but the last, which must be computed (R1),
        and of a prompt that is to be scored only those whose successors are scored."""
        ids = self.input_ids[:-1]
        return ids[: self.scored] if self.has_extras and self.to_score else ids

    def finish_before_start(self) -> FinishReason:
        """Whether a request is over as it comes: a resumed one whose last token was the last, or a stop token, or a
        constraint that allows nothing more. Raises ConstraintError for generated tokens that break it."""
        generated = len(self.ids) - self.prompt_len
        constraint = self.request.constraint
        if constraint is not None:
            constraint.accept(self.ids[self.prompt_len :].tolist())
            if constraint.is_complete:
                return FinishReason.STOP
        if generated > self.request.sampling.min_tokens and int(self.ids[-1]) in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if generated and len(self.ids) >= self.end_len else FinishReason.NONE

    def complete_one(self) -> None:
        """All input up to `device_len` is planned, and one token is sampled."""
        self.rows.cached_len[self.table_idx] = self.rows.device_len[self.table_idx]
        self.rows.device_len[self.table_idx] += 1


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Raises InvalidRequest if the request can never be served by a scheduler of this configuration."""
    sampling, tokens, prompt_len = request.sampling, len(request.prompt_ids), request.prompt_len
    if sampling.seed is None or sampling.max_tokens is None:
        raise InvalidRequest("sampling.seed and sampling.max_tokens must be numbers when a request is scheduled")
    if tokens == 0:
        raise InvalidRequest("the prompt is empty; send at least one token")
    if not 1 <= prompt_len <= tokens:
        raise InvalidRequest(f"prompt_len {prompt_len} must lie in 1..{tokens}, the tokens given")
    if tokens > prompt_len + sampling.max_tokens:
        raise InvalidRequest(
            f"a resumed request brings {tokens - prompt_len} generated tokens, more than its max_tokens "
            f"{sampling.max_tokens}"
        )
    limit = config.max_seq_len
    if prompt_len + 1 > limit:
        raise InvalidRequest(
            f"the prompt has {prompt_len} tokens; with one generated token it must fit in max_seq_len {limit}: "
            f"shorten it to {limit - 1} tokens or raise max_seq_len"
        )
    if prompt_len + sampling.max_tokens > limit:
        raise InvalidRequest(
            f"prompt of {prompt_len} tokens and max_tokens {sampling.max_tokens} exceed max_seq_len {limit}: "
            f"ask for at most {limit - prompt_len} tokens or raise max_seq_len"
        )
    pages = -(-tokens // config.page_size)
    if pages > config.num_pages:
        raise InvalidRequest(
            f"the prompt of {tokens} tokens needs {pages} pages of {config.page_size} tokens, the KV cache has "
            f"{config.num_pages}: shorten it to {config.num_pages * config.page_size} tokens or raise num_pages"
        )
