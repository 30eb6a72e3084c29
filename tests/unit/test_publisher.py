"""What a replica tells the ingresses, with a hand-made engine and sender."""

from __future__ import annotations

import numpy as np

from cluster.errors import EngineDeadError
from cluster.serve.publisher import Publisher
from cluster.serve.replica_report import ReplicaReport
from kvcache.digest import DigestReading, PrefixDigest


class Engine:
    recovering = None
    failure: EngineDeadError | None = None

    def __init__(self) -> None:
        self.digest = PrefixDigest(64, 100)
        self.answers = True

    def read_digest(self, everything: bool) -> DigestReading | None:
        reading = self.digest.read(everything)  # also when nobody waits for it any more
        return reading if self.answers and self.failure is None else None


class Sender:
    def __init__(self) -> None:
        self.reports: list[ReplicaReport] = []

    def send_report(self, number: int, report: ReplicaReport) -> bool:
        self.reports.append(report)
        return True


async def test_after_an_answer_that_came_too_late_everything_is_told_anew() -> None:
    engine, sender = Engine(), Sender()
    publisher = Publisher("r0", 64, engine, sender)
    publisher.subscribe(1)
    publisher._task.cancel()  # its turns are taken by hand
    await publisher._publish()
    engine.answers = False
    with publisher.counted(1, 10):
        await publisher._publish()
        assert len(sender.reports) == 1
        engine.answers = True
        await publisher._publish()
        await publisher._publish()
    assert [(report.sequence, report.change.full) for report in sender.reports] == [(1, True), (1, True), (2, False)]


async def test_an_engine_that_has_failed_says_so_to_those_who_know_it_and_to_newcomers() -> None:
    engine, sender = Engine(), Sender()
    publisher = Publisher("r0", 64, engine, sender)
    publisher.subscribe(1)
    publisher._task.cancel()  # its turns are taken by hand
    await publisher._publish()
    engine.failure = EngineDeadError("a rank died")
    publisher.subscribe(2)
    await publisher._publish()
    assert [(report.sequence, report.change.full, report.unwell) for report in sender.reports] == [
        (1, True, False), (2, False, True), (1, True, True),
    ]  # fmt: skip


def test_a_cache_without_a_digest_holds_nothing() -> None:
    change, hashes = DigestReading.empty()
    assert not change.full and not np.concatenate([change.added, change.removed, hashes]).size
