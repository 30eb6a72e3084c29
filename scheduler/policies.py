"""Who is admitted next, and who is preempted first.

=================  =======================================================  ==========================================
policy             serves well                                              price
=================  =======================================================  ==========================================
fcfs               everyone by arrival; the most even waiting times         ignores what the cache holds
longest_prefix     the cache: requests whose prefix is there go first, so   a request without a cached prefix is passed
                   shared prefixes are used before they are evicted         over, up to AGE_BOUND times
priority           larger `priority` first, arrival within one priority;    low priorities wait as long as higher ones
                   goes before long prompts of lower priority               keep coming
fair_share         the `user` with the least service first, so one user     a heavy user's queue waits longer
                   with a thousand requests cannot shut out the others
=================  =======================================================  ==========================================

All of them are deterministic. Preemption takes the youngest request (of the lowest priority, under `priority`);
preempted requests keep their place in line.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush

from scheduler.request import Req

AGE_BOUND = 64  # admissions of younger requests before the oldest goes first
WINDOW = 64  # oldest requests that longest_prefix chooses among
MAX_USERS = 16384  # whose service fair_share remembers
REFRESHED = 16  # of them whose match is looked up again per choice


class Policy(ABC):
    """The waiting line. Requests enter with `push` (also preempted ones) and leave with `remove`."""

    @abstractmethod
    def push(self, req: Req) -> None: ...

    @abstractmethod
    def remove(self, req: Req) -> None: ...

    @abstractmethod
    def head(self, cached_prefix: Callable[[Req], int]) -> Req | None:
        """The request to admit next. `cached_prefix` looks up how many of its tokens are cached (tens of us)."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Req]:
        """All that wait."""

    def admitted(self, req: Req) -> None:  # noqa: B027
        """Called when `req`, still in line, got a row."""

    def gave_back(self, req: Req, unused_tokens: int) -> None:  # noqa: B027
        """Called when `req` lost its row; `unused_tokens` of its prompt and `max_tokens` do not count as service."""

    def precedes(self, waiting: Req, prefilling: Req) -> bool:
        """Whether `waiting` may start before a prompt that is being prefilled goes on."""
        return False

    def preemption_key(self, req: Req) -> tuple[int, ...]:
        """The running request with the largest key is preempted first."""
        return (req.seq,)

    def victim(self, running: Iterable[Req]) -> Req:
        return max(running, key=self.preemption_key)


class SortedPolicy(Policy):
    """A line in the order of a fixed key."""

    def __init__(self) -> None:
        self._line: list[Req] = []

    @staticmethod
    def key(req: Req) -> tuple[int, ...]:
        return (req.seq,)

    def push(self, req: Req) -> None:
        if not self._line or self.key(self._line[-1]) < self.key(req):
            self._line.append(req)
        else:
            insort(self._line, req, key=self.key)

    def remove(self, req: Req) -> None:
        del self._line[0 if self._line[0] is req else bisect_left(self._line, self.key(req), key=self.key)]

    def head(self, cached_prefix: Callable[[Req], int]) -> Req | None:
        return self._line[0] if self._line else None

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._line)


class FirstComeFirstServed(SortedPolicy):
    """By arrival."""


class Priority(SortedPolicy):
    """Larger priority first, by arrival within one."""

    @staticmethod
    def key(req: Req) -> tuple[int, ...]:
        return (-req.request.priority, req.seq)

    def precedes(self, waiting: Req, prefilling: Req) -> bool:
        return waiting.request.priority > prefilling.request.priority

    def preemption_key(self, req: Req) -> tuple[int, ...]:
        return self.key(req)


class LongestPrefix(SortedPolicy):
    """Longest cached prefix first among the oldest `WINDOW`; the oldest when it was passed over `AGE_BOUND` times.

    Looking up a prefix costs, so lengths are remembered and a few are refreshed per choice, in turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, int] = {}  # seq -> cached prefix at last look
        self._turn = 0

    def head(self, cached_prefix: Callable[[Req], int]) -> Req | None:
        if not self._line:
            return None
        if self._line[0].passed_over >= AGE_BOUND:
            return self._line[0]
        window = self._line[:WINDOW]
        stale = {(self._turn + i) % len(window) for i in range(min(REFRESHED, len(window)))}
        self._turn = (self._turn + REFRESHED) % WINDOW
        for i, req in enumerate(window):
            if i in stale or req.seq not in self._known:
                self._known[req.seq] = cached_prefix(req)
        return max(window, key=lambda req: (self._known[req.seq], -req.seq))

    def admitted(self, req: Req) -> None:
        for older in self._line[:WINDOW]:
            if older.seq >= req.seq:
                break
            older.passed_over += 1

    def remove(self, req: Req) -> None:
        super().remove(req)
        self._known.pop(req.seq, None)


class FairShare(Policy):
    """The user with the least service first, by arrival within a user.

    Service is counted in tokens: prompt and `max_tokens` when a request gets a row, less what it leaves unused. A
    user who comes back after a pause starts level with the least served of those waiting, so idling earns no credit
    (the lift of virtual token counters: Sheng et al., Fairness in Serving Large Language Models, 2024). Requests
    without a user share one count.
    """

    def __init__(self) -> None:
        self._lines: dict[str, FirstComeFirstServed] = {}
        self._served: dict[str, int] = {}
        self._floor = 0  # service of the user who left the line last
        self._heap: list[tuple[int, int, str]] = []  # (service, seq of the first in line, user); may be out of date

    def push(self, req: Req) -> None:
        user = req.request.user or ""
        if user not in self._lines:
            first = self._first_user()
            floor = self._floor if first is None else self._served[first]
            self._served[user] = max(self._served.pop(user, 0), floor)
            self._forget_idle_users()
            self._lines[user] = FirstComeFirstServed()
        self._lines[user].push(req)
        self._post(user)

    def remove(self, req: Req) -> None:
        user = req.request.user or ""
        self._lines[user].remove(req)
        if not len(self._lines[user]):
            del self._lines[user]
            self._floor = self._served[user]
        self._post(user)

    def head(self, cached_prefix: Callable[[Req], int]) -> Req | None:
        user = self._first_user()
        return None if user is None else self._lines[user].head(cached_prefix)

    def admitted(self, req: Req) -> None:
        self._serve(req.request.user or "", req.end_len)

    def gave_back(self, req: Req, unused_tokens: int) -> None:
        self._serve(req.request.user or "", -unused_tokens)

    def _serve(self, user: str, tokens: int) -> None:
        self._served[user] = self._served.get(user, self._floor) + tokens
        self._post(user)

    def _post(self, user: str) -> None:
        """The user's service or first request changed."""
        if user in self._lines:
            heappush(self._heap, (self._served[user], next(iter(self._lines[user])).seq, user))
            if len(self._heap) > 64 + 4 * len(self._lines):
                self._heap = [(self._served[u], next(iter(line)).seq, u) for u, line in self._lines.items()]
                heapify(self._heap)

    def _first_user(self) -> str | None:
        while self._heap:
            served, seq, user = self._heap[0]
            line = self._lines.get(user)
            if line is not None and served == self._served[user] and seq == next(iter(line)).seq:
                return user
            heappop(self._heap)
        return None

    def _forget_idle_users(self) -> None:
        """Keep the table bounded: users long gone start level when they come back."""
        if len(self._served) > MAX_USERS:
            idle = [user for user in self._served if user not in self._lines]
            for user in idle[: len(idle) // 2]:
                del self._served[user]

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Req]:
        for line in self._lines.values():
            yield from line


POLICIES: dict[str, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "longest_prefix": LongestPrefix,
    "priority": Priority,
    "fair_share": FairShare,
}


def create_policy(name: str) -> Policy:
    """A fresh policy. Raises ValueError for an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known are {', '.join(POLICIES)}")
    return POLICIES[name]()
