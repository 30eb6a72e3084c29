"""A corrupted page state: found, who it may have touched ends with an error, the others get what they get alone."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cluster.driver import Driver
from cluster.errors import EngineDeadError, EngineError
from cluster.flight import FlightRecorder, Recording, read_recording
from cluster.flight import recorder as flight_recorder
from cluster.flight.replay import find_wrong_slot
from cluster.messages import Pong
from kvcache import IntegrityError
from scheduler.fake_model import FakeModel
from scheduler.fake_worker import FakeWorker
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.scheduler import Scheduler
from scheduler.step import StepPlan, StepResult
from tests.unit.flight_harness import RecordedHarness, engine_of
from tests.unit.scheduler_harness import make_config, make_request, run_alone

CONFIG = make_config(num_pages=120, max_running_requests=6)
SHARED = list(range(100, 112))  # three pages
REQUESTS = {
    1: make_request(1, [*SHARED, 1], max_tokens=40),
    2: make_request(2, [*SHARED, 2, 2], max_tokens=40),
    3: make_request(3, [3] * 9, max_tokens=40),
    4: make_request(4, [4] * 5, max_tokens=40),
}


def row_of(scheduler: Scheduler, request_id: int) -> int:
    return scheduler._table.unfinished[request_id].table_idx


def last_page(scheduler: Scheduler, request_id: int) -> tuple[int, int]:
    """(row, column) of the request's last page."""
    row = row_of(scheduler, request_id)
    return row, scheduler.rows.num_pages(row) - 1


def one_page_in_two_rows(scheduler: Scheduler) -> None:
    table = scheduler.rows.page_table
    table[last_page(scheduler, 3)] = table[last_page(scheduler, 4)]


def a_page_in_use_is_free(scheduler: Scheduler) -> None:
    scheduler.cache.allocator.free(scheduler.rows.page_table[last_page(scheduler, 3)][None])


def a_page_is_lost(scheduler: Scheduler) -> None:
    scheduler.cache.allocator.allocate(1)


def a_row_and_the_tree_disagree(scheduler: Scheduler) -> None:
    row = row_of(scheduler, 1)
    scheduler.rows.page_table[row, :2] = scheduler.rows.page_table[row, 1::-1][:2]


def a_page_of_the_tree_is_free(scheduler: Scheduler) -> None:
    scheduler.cache.allocator.free(scheduler.rows.page_table[row_of(scheduler, 1), 1][None])


def a_page_out_of_the_pool(scheduler: Scheduler) -> None:
    scheduler.rows.page_table[last_page(scheduler, 4)] = 10_000 * CONFIG.page_size


def a_negative_page(scheduler: Scheduler) -> None:
    scheduler.rows.page_table[last_page(scheduler, 4)] = -CONFIG.page_size


CORRUPTIONS = [
    (one_page_in_two_rows, {3, 4}),
    (a_page_in_use_is_free, {3}),
    (a_page_is_lost, set()),
    (a_row_and_the_tree_disagree, {1, 2}),
    (a_page_of_the_tree_is_free, {1, 2}),
    (a_page_out_of_the_pool, {1, 2, 3, 4}),
    (a_negative_page, {1, 2, 3, 4}),
]


@pytest.mark.parametrize(("corrupt", "touched"), CORRUPTIONS, ids=[each[0].__name__ for each in CORRUPTIONS])
def test_a_flush_ends_those_it_touched_and_no_other(
    corrupt: Callable[[Scheduler], None], touched: set[int], tmp_path: Path
) -> None:
    harness = RecordedHarness(CONFIG, steps=16)
    harness.add(*REQUESTS.values())
    for _ in range(12):
        harness.step()
    harness.plan()
    assert harness.in_flight
    scheduler = harness.scheduler
    corrupt(scheduler)
    with pytest.raises(IntegrityError) as caught:
        scheduler.check_pages()
    assert set(scheduler.flush(caught.value.pages, "corrupted")) == touched
    assert not scheduler.stats().cached_pages
    # Pages are free that steps in flight use: those run before any step that gets the pages.
    harness.in_flight = deque((plan, result, set()) for plan, result, _ in harness.in_flight)
    harness.add(make_request(5, [*SHARED, 5], max_tokens=10))
    harness.drain()
    harness.check(tmp_path)
    for request_id, stream in harness.streams.items():
        expected, finish = run_alone(stream.request, harness.model, CONFIG)
        if request_id in touched:
            assert (stream.finish, stream.error) == (FinishReason.ERROR, "corrupted")
            assert stream.tokens == expected[: len(stream.tokens)]
        else:
            assert (stream.finish, stream.tokens) == (finish, expected)
    stats = scheduler.stats()
    assert stats.free_pages + stats.cached_pages == stats.total_pages


class DrivenGroup:
    """One rank, in the driver's thread, that does not check the slots that it is told."""

    size = 1

    def __init__(self) -> None:
        self._worker = FakeWorker(CONFIG, FakeModel(1000), full_check=False)
        self._arrived: queue.SimpleQueue[StepResult | tuple[int, Pong] | None] = queue.SimpleQueue()

    def send_plan(self, plan: StepPlan) -> None:
        self._arrived.put(self._worker.execute(plan))

    def ping(self, number: int) -> None:
        self._arrived.put((0, Pong(number)))

    def poll(self, timeout: float | None) -> list[StepResult | tuple[int, Pong]]:
        try:
            item = self._arrived.get(timeout=timeout)
        except queue.Empty:
            return []
        return [] if item is None else [item]

    def wake(self) -> None:
        self._arrived.put(None)

    def settled(self) -> None: ...

    def stop(self, grace: float = 0.0) -> None: ...


class DyingGroup(DrivenGroup):
    """Its rank dies in step 15."""

    def send_plan(self, plan: StepPlan) -> None:
        if plan.step_id == 15:
            raise EngineDeadError("rank 0 died")
        super().send_plan(plan)


class Served:
    """A driver with its streams. `corrupt` is called in the driver's thread when `after` outputs have come."""

    def __init__(
        self, directory: Path, interval: int, corrupt: Callable[[Scheduler], None] = lambda scheduler: None,
        after: int = 0, group: DrivenGroup | None = None,
    ) -> None:  # fmt: skip
        self.scheduler = Scheduler(CONFIG)
        self.tokens: dict[int, list[int]] = {number: [] for number in REQUESTS}
        self.finish: dict[int, FinishReason] = {}
        self.errors: dict[int, str] = {}
        self.failures: queue.SimpleQueue[EngineError] = queue.SimpleQueue()
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._corrupt, self._after = corrupt, after
        recorder = FlightRecorder(self.scheduler, 16, True, engine_of(CONFIG), directory)
        self.driver = Driver(
            group or DrivenGroup(), self.scheduler, 30.0, interval, self._take, self.failures.put, recorder=recorder
        )
        for request in REQUESTS.values():
            self.driver.post(lambda request=request: self.scheduler.add(request))
        self.driver.start()

    def wait(self) -> None:
        self._over.get(timeout=60)

    def _take(self, outputs: StepOutputs) -> None:
        columns = (outputs.request_ids.tolist(), outputs.tokens.tolist(), outputs.finish.tolist())
        for number, token, finish in zip(*columns, strict=True):
            assert number not in self.finish
            if token >= 0:
                self.tokens[number].append(token)
            if finish:
                self.finish[number] = FinishReason(finish)
        self.errors |= outputs.errors
        self._after -= 1
        if self._after == 0:
            self._corrupt(self.scheduler)
        if self.finish.keys() == REQUESTS.keys():
            self._over.put(None)


def test_the_driver_ends_the_touched_counts_and_saves_the_steps(tmp_path: Path) -> None:
    served = Served(tmp_path, 1, a_page_in_use_is_free, after=15)
    try:
        served.wait()
        assert served.driver.integrity_violations == 1 and served.driver.failure is None
    finally:
        served.driver.close()
    for number, request in REQUESTS.items():
        expected, _ = run_alone(request, FakeModel(1000), CONFIG)
        if number == 3:
            assert served.finish[number] == FinishReason.ERROR
            assert "the KV cache was found corrupted" in served.errors[number]
            assert served.tokens[number] == expected[: len(served.tokens[number])]
            assert len(served.tokens[number]) < len(expected)
        else:
            assert (served.finish[number], served.tokens[number]) == (FinishReason.LENGTH, expected)
    (path,) = tmp_path.iterdir()
    recording = read_recording(path)
    assert recording.reason.startswith("integrity violation: page ")
    assert find_wrong_slot(recording) is None  # found before any plan used it


def test_a_driver_that_fails_saves_the_steps(tmp_path: Path) -> None:
    def break_scheduler(scheduler: Scheduler) -> None:
        scheduler.decode.rows = np.array([77], dtype=np.int64)

    served = Served(tmp_path, 0, break_scheduler, after=15)
    assert "IndexError" in str(served.failures.get(timeout=60))
    served.driver.close()
    (path,) = tmp_path.iterdir()
    recording = read_recording(path)
    assert "the driver loop failed: IndexError" in recording.reason
    assert len(recording.steps) >= 8 and recording.broken is None


def test_a_rank_that_dies_has_the_steps_saved_with_the_one_it_died_in(tmp_path: Path) -> None:
    served = Served(tmp_path, 0, group=DyingGroup())
    assert "rank 0 died" in str(served.failures.get(timeout=60))
    served.driver.close()
    (path,) = tmp_path.iterdir()
    recording = read_recording(path)
    assert recording.reason == "rank 0 died"
    assert recording.steps[-1].plan.step_id == 15 and recording.steps[-1].tokens is None
    assert find_wrong_slot(recording) is None


def test_a_recording_is_written_beside_what_follows_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_disk, write_into = threading.Event(), flight_recorder.write_into

    def write_slowly(directory: Path, recording: Recording) -> Path:
        assert slow_disk.wait(60)
        return write_into(directory, recording)

    monkeypatch.setattr(flight_recorder, "write_into", write_slowly)
    served = Served(tmp_path, 1, a_page_in_use_is_free, after=15)
    try:
        served.wait()  # all streams have ended
        assert not list(tmp_path.iterdir())
    finally:
        slow_disk.set()
        served.driver.close()
    assert len(list(tmp_path.iterdir())) == 1
