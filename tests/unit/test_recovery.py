"""What recovery decides, without ranks: when to start again, and whose fault the failures are."""

from __future__ import annotations

import numpy as np

from cluster.recovery import FIRST_DELAY, LAST_DELAY, PROGRESS, Interrupted, StartBudget, Suspects


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TestStartBudget:
    def test_none_are_left_after_the_limit_until_the_window_has_passed(self) -> None:
        clock = Clock()
        budget = StartBudget(3, 60.0, clock)
        for _ in range(3):
            assert budget.take() == 0
            budget.step_answered()
            clock.now += 10
        assert budget.take() is None
        clock.now += 29.9
        assert budget.take() is None
        clock.now += 0.1  # the first is 60 s old
        assert budget.take() == 0
        assert budget.take() is None

    def test_a_limit_of_none_allows_none(self) -> None:
        assert StartBudget(0, 60.0).take() is None

    def test_starts_that_bring_nothing_come_further_and_further_apart(self) -> None:
        budget = StartBudget(100, 1e9, Clock())
        delays = [budget.take() for _ in range(12)]
        assert delays[:4] == [0, FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY]
        assert delays == sorted(delays) and delays[-1] == LAST_DELAY
        budget.step_answered()
        assert budget.take() == 0

    def test_starts_that_a_removed_cause_took_are_given_back_with_the_next_step(self) -> None:
        budget = StartBudget(2, 60.0, Clock())
        budget.take(), budget.take()
        budget.cause_removed()
        assert budget.take() is None  # nothing shows yet that it was the cause
        budget.step_answered()
        assert budget.take() == 0
        budget.step_answered()
        assert budget.take() == 0
        assert budget.take() is None


class Requests:
    """Known lengths of running requests, as the scheduler would say them."""

    def __init__(self, *ids: int) -> None:
        self.known = dict.fromkeys(ids, 10)

    def run(self, *ids: int, tokens: int = PROGRESS) -> None:
        for request in ids:
            self.known[request] += tokens

    def of(self, *ids: int) -> dict[int, int]:
        return {request: self.known[request] for request in ids}


class TestSuspects:
    def test_failures_between_which_requests_get_on_make_nobody_suspect(self) -> None:
        suspects, requests = Suspects(), Requests(1, 2, 3)
        for _ in range(50):
            assert suspects.failed(requests.of(1, 2, 3)) is None
            assert suspects.alone is None
            requests.run(1, 2, 3)

    def test_suspects_run_alone_youngest_first_and_the_one_that_fails_alone_is_convicted(self) -> None:
        suspects, requests = Suspects(), Requests(1, 2, 3, 4)
        suspects.failed(requests.of(1, 2, 3))
        assert suspects.failed(requests.of(1, 2, 3, 4)) is None  # 4 is new
        assert suspects.alone == 3
        suspects.review(requests.known.get)
        assert suspects.alone == 3
        requests.run(3, tokens=PROGRESS - 1)
        suspects.review(requests.known.get)
        assert suspects.alone == 3
        requests.run(3, tokens=1)
        suspects.review(requests.known.get)
        assert suspects.alone == 2
        assert suspects.failed(requests.of(2)) == 2
        assert suspects.alone == 1
        requests.run(1)
        suspects.review(requests.known.get)
        assert suspects.alone is None

    def test_a_request_that_fails_a_few_tokens_later_is_suspect_too(self) -> None:
        suspects, requests = Suspects(), Requests(1)
        suspects.failed(requests.of(1))
        requests.run(1, tokens=2)
        suspects.failed(requests.of(1))
        assert suspects.alone == 1
        requests.run(1, tokens=1)
        assert suspects.failed(requests.of(1)) == 1

    def test_requests_that_end_are_cleared(self) -> None:
        suspects, requests = Suspects(), Requests(1, 2)
        suspects.failed(requests.of(1, 2))
        suspects.failed(requests.of(1, 2))
        requests.known.clear()
        suspects.review(requests.known.get)
        assert suspects.alone is None

    def test_a_failure_with_another_request_in_flight_convicts_nobody(self) -> None:
        suspects, requests = Suspects(), Requests(1, 2, 3)
        suspects.failed(requests.of(1, 2, 3))
        suspects.failed(requests.of(1, 2, 3))
        requests.run(3)
        suspects.review(requests.known.get)
        assert suspects.alone == 2
        assert suspects.failed(requests.of(2, 3)) is None  # 3's last step was still in flight
        assert suspects.alone == 2
        assert suspects.failed({}) is None  # nor does one with nothing in flight
        assert suspects.alone == 2
        assert suspects.failed(requests.of(2)) == 2
        assert suspects.alone == 1
        requests.run(1, 2)
        suspects.review(requests.known.get)
        assert suspects.alone is None

    def test_a_failure_between_clears_those_that_were_not_in_flight(self) -> None:
        suspects, requests = Suspects(), Requests(1, 2)
        suspects.failed(requests.of(1))
        suspects.failed(requests.of(2))
        suspects.failed(requests.of(1))
        assert suspects.alone is None

    def test_several_culprits_are_found_one_after_the_other(self) -> None:
        suspects, requests = Suspects(), Requests(*range(1, 17))
        culprits, convicted = {3, 11}, set()
        for _ in range(10):
            running = [r for r in requests.known if suspects.alone in (None, r)]
            if not culprits & set(running):
                requests.run(*running)
                suspects.review(requests.known.get)
                while suspects.alone is not None and suspects.alone not in culprits:
                    requests.run(suspects.alone)
                    suspects.review(requests.known.get)
                continue
            convict = suspects.failed(requests.of(*running))
            if convict is not None:
                convicted.add(convict)
                del requests.known[convict]
        assert convicted == culprits
        assert suspects.alone is None


class TestInterrupted:
    def test_until_each_has_been_heard_of(self) -> None:
        interrupted = Interrupted()
        assert not interrupted
        interrupted.failed([1, 2])
        interrupted.heard_of(np.array([2, 7]))
        interrupted.failed([2, 3])  # again, before the first was heard of
        interrupted.heard_of(np.array([1, 2]))
        assert interrupted
        interrupted.heard_of(np.array([3]))
        assert not interrupted
