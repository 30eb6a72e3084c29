"""A clock of CPU time for the tests of grammars."""

from __future__ import annotations


class CpuClock:
    """What each mask and each token costs, as the clock of the thread's CPU time shows it."""

    def __init__(self, cost):
        self.cost = cost
        self.now = 0.0

    def thread_time(self):
        self.now += self.cost
        return self.now
