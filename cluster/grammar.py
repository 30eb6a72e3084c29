"""A grammar while outputs follow it: its place in one of them, what it may cost, and what it shares with the others."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from scheduler.constraint import Constraint, ConstraintError

if TYPE_CHECKING:
    import llguidance

STEP_SECONDS = 0.005
"""What each mask and each token may take of the driver's time, a hundred times of what they usually do."""
SPARE_SECONDS = 1.0
"""By how much a request may go beyond that, all in all."""
SHARED_SECONDS = 0.1
"""Of use, after which a compiled grammar takes no more outputs. The worst that we know finds 30,000 states in it, 25
MB; a common schema serves some 3,000 tokens, and is built again in a millisecond."""
REPLAYED_AT_ONCE = 16
"""Tokens, after which the budget is looked at: of an ambiguous grammar each may take milliseconds."""
_MESSAGE_LENGTH = 400


class CompiledGrammar:
    """One grammar for all outputs that follow it: to copy its beginning takes a hundredth of building it, and copies
    need not find the states of their lexer again that others have found.

    They share the limit for these states too (llguidance can do no other), and when it is reached none of them can go
    on, whoever found the most. Those go on `elsewhere`.

    Args:
        start: at the grammar's beginning, where it stays.
        build: makes another.
        first_token: one that an output may begin with.
    """

    def __init__(
        self, start: llguidance.LLMatcher, build: Callable[[], llguidance.LLMatcher], first_token: int
    ) -> None:
        self.first_token = first_token
        self.users = 0  # outputs, ended ones too
        self._start: llguidance.LLMatcher | None = start
        self._build = build
        self._seconds = 0.0
        self._used_up = False
        self._successor: CompiledGrammar | None = None

    def join(self) -> llguidance.LLMatcher | None:
        """The beginning, to be copied for one more output; None if it takes no more. One thread at a time."""
        start = self._start  # the driver's thread may take it away
        self.users += start is not None
        return start

    def count(self, seconds: float) -> None:
        """What an output took. Time stands for the states, whose number llguidance does not tell."""
        self._seconds += seconds
        if self._seconds > SHARED_SECONDS:
            self.retire()

    def retire(self) -> None:
        """It takes no more outputs; its memory is free when those that it has are gone."""
        self._start = None

    def elsewhere(self) -> tuple[CompiledGrammar, llguidance.LLMatcher]:
        """Where an output goes on when the states are used up, already joined. The first that asks gets a grammar of
        its own, since it may use up another; the others share one, so that two are built for however many outputs."""
        self.retire()
        if not self._used_up:
            self._used_up = True
            return self._another()
        start = self._successor.join() if self._successor is not None else None
        if start is None:
            self._successor, start = self._another()
        return self._successor, start

    def _another(self) -> tuple[CompiledGrammar, llguidance.LLMatcher]:
        compiled = CompiledGrammar(self._build(), self._build, self.first_token)
        return compiled, compiled.join()


class Grammar(Constraint):
    """A position in a compiled grammar.

    Whoever runs it is held up while it works, and so are all other requests. So `accept` and `fill_mask` also raise
    ConstraintError when they have taken `SPARE_SECONDS` more than `STEP_SECONDS` for each mask and each token; what
    cheap ones leave is not saved up. It is CPU time of the calling thread, to which the machine's load adds nothing.
    To go on elsewhere is part of it, and tokens that are replayed add nothing to what may be taken.

    Args:
        compiled: which this output has joined.
        start: its beginning.
        mask_words: int32 words of a mask.
    """

    def __init__(self, compiled: CompiledGrammar, start: llguidance.LLMatcher, mask_words: int) -> None:
        from llguidance.numpy import fill_next_token_bitmask

        self.compiled = compiled
        self.mask_words = mask_words
        self._start = start
        self._matcher = start.deep_copy()
        self._fill = fill_next_token_bitmask
        self._tokens = array("i")
        self._beyond = 0.0  # seconds

    def accept(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._do(lambda: self._matcher.consume_tokens(list(tokens)), len(tokens))
            self._tokens.extend(tokens)

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped()

    def fill_mask(self, out: np.ndarray) -> None:
        self._do(lambda: self._fill(self._matcher, out[None], 0), 1)

    def _do(self, work: Callable[[], object], steps: int) -> None:
        begin = time.thread_time()
        work()
        while self._matcher.is_error():
            used_up = self._used_up()
            if not used_up or self.compiled.users <= 1:  # another lexer would not help
                self.compiled.retire()
                message = short(used_up or self._matcher.get_error())
                raise ConstraintError(f"the output's grammar cannot go on: {message}")
            begin = self._go_on_elsewhere(begin)
            work()
        self._charge(begin, steps)

    def _used_up(self) -> str:
        """The lexer's error if it cannot even begin now; or nothing. The matcher's own may blame the token."""
        other = self._start.deep_copy()
        other.consume_token(self.compiled.first_token)  # which is cheaper than a mask
        return other.get_error()

    def _go_on_elsewhere(self, begin: float) -> float:
        begin = self._charge(begin, 0)
        self.compiled, self._start = self.compiled.elsewhere()
        self._matcher = self._start.deep_copy()
        for at in range(0, len(self._tokens), REPLAYED_AT_ONCE):
            self._matcher.consume_tokens(self._tokens[at : at + REPLAYED_AT_ONCE].tolist())
            begin = self._charge(begin, 0)
        return begin

    def _charge(self, begin: float, steps: int) -> float:
        """For the time since `begin`. Returns the time now."""
        now = time.thread_time()
        self.compiled.count(now - begin)
        self._beyond = max(self._beyond + now - begin - steps * STEP_SECONDS, 0.0)
        if self._beyond > SPARE_SECONDS:
            raise ConstraintError(
                f"the output's grammar cannot go on: its masks took {self._beyond:.1f} s beyond "
                f"{1e3 * STEP_SECONDS:g} ms each, {SPARE_SECONDS:g} s beyond is the limit; write it with fewer ways to "
                "read the same text"
            )
        return now


def short(message: str) -> str:
    """The beginning of one of the library's messages, which may show all of the grammar."""
    message = message.strip()
    return message if len(message) <= _MESSAGE_LENGTH else message[:_MESSAGE_LENGTH] + " ..."
