"""Ranks that die, hang and throw under streams: none breaks, and every text is that of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from cluster import spare_ranks
from cluster.errors import EngineClosedError, EngineDeadError, OverloadedError
from cluster.llm import LLM
from cluster.model_files import resolve_model
from scheduler.outputs import FinishReason
from scheduler.sampling_params import SamplingParams
from tests.chaos.faults import FailOnce, use_runner
from tests.chaos.load import CONFIG, ColdStart, Load, Pause, report, running
from tests.chaos.sockets import break_connections_between
from tests.checkpoints import load_reference
from tests.references import score_gap

pytestmark = [pytest.mark.usefixtures("private_ray"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[list[int]]:
    """What every stream gives when nothing goes wrong."""
    with running(Load(tiny_llama)) as load:
        return load.run_once()


def wait_until(condition, timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


STEP_TIMEOUT = 10.0  # seconds; a rank that is well is never silent for so long
HASTY = 4  # every so many kills do not wait until there are spare ranks again


@pytest.fixture
def soon_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_ranks, "DELAY", 2.0)


def disturb(load: Load, number: int, times: int, rng: random.Random) -> tuple[list[Pause], ColdStart]:
    """Send a signal to a random rank at a random moment, again and again."""
    pauses, since, began = [], 0.0, time.monotonic()
    load.start()
    load.wait_for_tokens_everywhere(began)
    cold = ColdStart.of(load)
    for done in range(times):
        load.wait_for_tokens_everywhere(since)
        if (done + 1) % HASTY:
            wait_until(lambda: load.engine._group.spares_ready)
        time.sleep(rng.random())
        victim = rng.choice(load.engine.info.ranks).pid
        with load.changed:
            open_streams = load.live()
            killed = time.monotonic()
            os.kill(victim, number)
        wait_until(lambda done=done: load.failures or load.engine.metrics()["recoveries"] > done, 300)
        assert not load.failures, load.failures
        recovery = load.engine.last_recoveries[-1]
        load.wait(lambda r=recovery, s=open_streams: all(x.finish or x.times[-1:] > [r.ready] for x in s))
        since = recovery.ready
        pauses.append(Pause.of(killed, recovery, [s for s in open_streams if s.times and s.times[-1] > recovery.ready]))
        assert not psutil.pid_exists(victim)
    return pauses, cold


def show(record_property, title: str, pauses: list[Pause], cold: ColdStart) -> None:
    table = report(title, pauses, cold)
    print("\n" + table)
    record_property("pauses", table)


@pytest.mark.usefixtures("soon_spares")
@pytest.mark.timeout(2400)
def test_kill_9_of_a_random_rank_again_and_again(
    tiny_llama: Path, expected: list[list[int]], pytestconfig: pytest.Config, record_property
) -> None:
    kills = pytestconfig.option.repetitions or 2
    with running(Load(tiny_llama)) as load:
        pauses, cold = disturb(load, signal.SIGKILL, kills, random.Random(kills))
        load.drain()
        assert load.check(expected) >= 32
        assert load.engine.metrics()["recoveries"] == kills
    show(record_property, "kill -9", pauses, cold)
    assert all(pause.spares for number, pause in enumerate(pauses, 1) if number % HASTY)
    assert max(pause.detect for pause in pauses) < 20.0  # by its death, not by step_timeout


@pytest.mark.usefixtures("soon_spares")
@pytest.mark.timeout(2400)
def test_a_stopped_rank_is_found_by_the_watchdog(
    tiny_llama: Path, expected: list[list[int]], pytestconfig: pytest.Config, record_property
) -> None:
    stops = pytestconfig.option.repetitions or 1
    with running(Load(tiny_llama, step_timeout=STEP_TIMEOUT)) as load:
        pauses, cold = disturb(load, signal.SIGSTOP, stops, random.Random(stops))
        load.drain()
        load.check(expected)
    show(record_property, f"SIGSTOP, step_timeout {STEP_TIMEOUT:g} s", pauses, cold)


@pytest.mark.parametrize(
    ("rank", "how"),
    [
        (1, "die"),
        pytest.param(0, "raise", marks=pytest.mark.full_grid),
        pytest.param(1, "raise", marks=pytest.mark.full_grid),
    ],
)
def test_a_step_that_goes_wrong_on_one_rank(
    tiny_llama: Path,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
    rank: int,
    how: str,
) -> None:
    mark, times = tmp_path / "failed", pytestconfig.option.repetitions or 1
    use_runner(monkeypatch, FailOnce(mark, rank, step=40, how=how))
    with running(Load(tiny_llama)) as load:
        for _ in range(times):
            mark.unlink(missing_ok=True)
            assert load.run_once() == expected
        recoveries = load.engine.last_recoveries
        assert len(recoveries) == times
        for recovery in recoveries:
            assert recovery.starts == 1
            assert how == "die" or f"rank {rank} " in recovery.cause  # a survivor may be heard first
            assert how == "die" or "RuntimeError: forward failed" in recovery.cause


@pytest.mark.full_grid
def test_a_broken_process_group(tiny_llama: Path, expected: list[list[int]], pytestconfig: pytest.Config) -> None:
    times = pytestconfig.option.repetitions or 1
    with running(Load(tiny_llama)) as load:
        load.start()
        since = 0.0
        for done in range(times):
            load.wait_for_tokens_everywhere(since)
            pids = [rank.pid for rank in load.engine.info.ranks]
            assert break_connections_between(*pids) > 0
            wait_until(lambda done=done: load.failures or load.engine.metrics()["recoveries"] > done)
            assert not load.failures, load.failures
            since = load.engine.last_recoveries[-1].ready
        load.drain()
        load.check(expected)
        for recovery in load.engine.last_recoveries:
            assert "failed in phase 'serving'" in recovery.cause


@pytest.mark.full_grid
def test_a_rank_that_dies_while_it_starts_again_is_one_more_attempt(
    tiny_llama: Path, expected: list[list[int]]
) -> None:
    with running(Load(tiny_llama)) as load:
        before = load.engine.info.ranks
        load.start()
        load.wait_for_tokens_everywhere(0.0)
        os.kill(before[0].pid, signal.SIGKILL)
        group = load.engine._group
        wait_until(lambda: len(group._ranks) == 2 and group._ranks[1].pid != before[1].pid and group._runs)
        os.kill(group._ranks[1].pid, signal.SIGKILL)
        wait_until(lambda: load.engine.last_recoveries, 60)
        assert load.engine.last_recoveries[0].starts == 2
        load.drain()
        load.check(expected)


@pytest.mark.full_grid
def test_while_it_recovers_requests_queue_within_limits_and_questions_are_answered(
    tiny_llama: Path, expected: list[list[int]]
) -> None:
    with running(Load(tiny_llama, max_running_requests=8, max_queued_requests=4)) as load:
        streams = [load.submit(number) for number in range(8)]
        load.wait(lambda: all(stream.tokens for stream in streams))
        os.kill(load.engine.info.ranks[1].pid, signal.SIGKILL)
        wait_until(lambda: load.engine.recovering is not None)
        assert "rank 1" in load.engine.recovering
        queued = [load.submit(number) for number in range(8, 12)]
        with pytest.raises(OverloadedError):
            load.submit(12)
        aborted = max(load.streams) - 1  # the last that was accepted
        load.engine.abort(aborted)
        load.wait(lambda: load.streams[aborted].finish == FinishReason.ABORT)
        stats = load.engine.stats()
        assert stats["waiting"] == 11 and stats["running"] == 0
        assert load.engine.recovering is not None and load.engine.failure is None
        load.wait(lambda: all(stream.finish for stream in streams + queued))
        assert load.engine.recovering is None
        for stream in streams + queued[:-1]:
            assert stream.tokens == expected[stream.number]


def test_shutdown_does_not_wait_for_a_recovery(tiny_llama: Path) -> None:
    with running(Load(tiny_llama, count=2)) as load:
        load.start()
        load.wait_for_tokens_everywhere(0.0)
        group, before = load.engine._group, load.engine.info.ranks
        os.kill(before[0].pid, signal.SIGKILL)
        wait_until(lambda: len(group._ranks) == 2 and group._ranks[1].pid != before[1].pid)
        pids = [rank.pid for rank in (*before, *group._ranks)]
        load.engine.shutdown()
        assert isinstance(load.failures[0], EngineClosedError)
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_group_that_fails_too_often_fails_its_requests_with_one_clear_error(tiny_llama: Path) -> None:
    with running(Load(tiny_llama, count=4, max_recoveries=1)) as load:
        pids = [rank.pid for rank in load.engine.info.ranks]
        load.start()
        load.wait_for_tokens_everywhere(0.0)
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: load.engine.last_recoveries)
        pids += [rank.pid for rank in load.engine.info.ranks]
        os.kill(pids[3], signal.SIGKILL)
        load.wait(lambda: load.failures)
        assert isinstance(load.failures[0], EngineDeadError)
        assert "rank 1" in str(load.failures[0]) and "given up after 1 starts" in str(load.failures[0])
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
        with pytest.raises(EngineDeadError):
            load.submit(0)


@pytest.mark.full_grid
def test_llm_generate_survives_a_kill(tiny_llama: Path) -> None:
    prompts = [list(range(3, 20)), [7, 8, 9], list(range(40, 90))]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=5, max_tokens=200, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=6, max_tokens=150, ignore_eos=True, presence_penalty=0.5),
    ]
    settings = {key: value for key, value in CONFIG.items() if key != "max_recoveries"}
    with LLM(str(tiny_llama), **settings) as llm:
        undisturbed = llm.generate(prompts, sampling)
        results: list = []
        thread = threading.Thread(target=lambda: results.extend(llm.generate(prompts, sampling)))
        thread.start()
        wait_until(lambda: llm.stats()["running"] == 3)
        os.kill(llm.info.ranks[0].pid, signal.SIGKILL)
        thread.join(60)
        assert [output.token_ids for output in results] == [output.token_ids for output in undisturbed]
        assert len(llm._engine.last_recoveries) == 1


@pytest.mark.full_grid
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("tp_size", [3, 1])
@pytest.mark.usefixtures("soon_spares")
def test_smollm2(tp_size: int, pytestconfig: pytest.Config, record_property) -> None:
    """A difference from the undisturbed run counts only where the two tokens' scores are no tie."""
    path, kills = resolve_model(None), pytestconfig.option.repetitions or 20
    config = {"lengths": (24, 48), "tp_size": tp_size, "page_size": 16, "num_pages": 512}
    with running(Load(path, **config)) as load:
        expected = load.run_once()
        pauses, cold = disturb(load, signal.SIGKILL, kills, random.Random(3))
        load.drain()
        count = load.check(expected, partial(score_gap, load_reference(path)))
        assert load.engine.metrics()["recoveries"] == kills
    show(record_property, f"SmolLM2, TP {tp_size}, kill -9, {count} streams, {load.ties} ties", pauses, cold)
