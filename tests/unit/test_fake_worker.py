"""The fake worker itself: right plans run and depend on every token, each kind of wrong plan is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from scheduler.config import SchedulerConfig
from scheduler.fake_model import FakeModel
from scheduler.fake_worker import FakeWorker, FakeWorkerError
from scheduler.step import StepPlan, StepPlanWriter, pack_sampling

CONFIG = SchedulerConfig(num_pages=8, page_size=4, max_running_requests=4, max_seq_len=16, max_step_tokens=32)


def make_plan(
    step_id: int,
    entries: list[tuple[int, int, int, list[int]]],
    *,
    num_decode: int = 0,
    sample: list[int] | None = None,
    deltas: list[tuple[int, int, int]] = (),
    runs: dict[int, tuple[int, list[int]]] | None = None,
    admit: dict[int, int] | None = None,
    suppress: dict[int, tuple[int, list[int]]] | None = None,
    pad: int = 0,
) -> StepPlan:
    """Entries are (row, cached_len, device_len, out_loc); `runs` row -> (first, tokens), `admit` row -> seed."""
    runs, admit, suppress = runs or {}, admit or {}, suppress or {}
    sample = list(range(len(entries))) if sample is None else sample
    out_loc = [slot for entry in entries for slot in entry[3]]
    n = len(entries)
    plan = StepPlanWriter(ring=1).begin(
        step_id=step_id, num_rows=n, num_decode=num_decode, num_samples=len(sample), num_tokens=len(out_loc),
        padded_rows=n + pad, padded_tokens=len(out_loc) + pad, page_deltas=len(deltas), token_runs=len(runs),
        run_tokens=sum(len(tokens) for _, tokens in runs.values()), sampling=len(admit), suppress_runs=len(suppress),
        suppress_ids=sum(len(ids) for _, ids in suppress.values()),
    )  # fmt: skip
    plan.rows[:] = [entry[0] for entry in entries] + [4] * pad
    plan.cached_len[:] = [entry[1] for entry in entries] + [0] * pad
    plan.device_len[:] = [entry[2] for entry in entries] + [1] * pad
    plan.out_loc[:] = out_loc + [32] * pad
    plan.sample[:] = np.arange(n + pad)
    plan.sample[: len(sample)] = sample
    plan.page_deltas[...] = np.array(deltas, dtype=np.int32).reshape(-1, 3)
    plan.token_runs[...] = np.array([(r, f, len(t)) for r, (f, t) in runs.items()], dtype=np.int32).reshape(-1, 3)
    plan.run_tokens[:] = [token for _, tokens in runs.values() for token in tokens]
    for out, (row, seed) in zip(plan.sampling, admit.items(), strict=True):
        pack_sampling(out, row=row, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0, seed=seed, prompt_len=1)
    plan.suppress_runs[...] = np.array([(r, u, len(i)) for r, (u, i) in suppress.items()], dtype=np.int32).reshape(
        -1, 3
    )
    plan.suppress_ids[:] = [token for _, ids in suppress.values() for token in ids]
    return plan.seal()


PROMPT = [11, 12, 13, 14, 15]


def prefill(step_id: int = 1, tokens: list[int] = PROMPT, seed: int = 0, **changes: object) -> StepPlan:
    """Row 0 gets five tokens into slots 8..11 and 4."""
    entries = [(0, 0, 5, [8, 9, 10, 11, 4])]
    values = {"entries": entries, "deltas": [(0, 0, 8), (0, 4, 4)], "runs": {0: (0, tokens)}, "admit": {0: seed}}
    return make_plan(step_id, **(values | changes))


def decode(step_id: int = 2, **changes: object) -> StepPlan:
    return make_plan(step_id, **({"entries": [(0, 5, 6, [5])], "num_decode": 1} | changes))


def worker_after(*plans: StepPlan) -> FakeWorker:
    worker = FakeWorker(CONFIG, FakeModel(vocab_size=1000, eos_token_id=0))
    for plan in plans:
        worker.execute(plan)
    return worker


def test_the_next_token_depends_on_every_token_and_the_seed_and_on_nothing_else() -> None:
    def second(tokens: list[int], seed: int = 0) -> int:
        return int(worker_after(prefill(tokens=tokens, seed=seed)).execute(decode()).tokens[0])

    base = second(PROMPT)
    assert base == second(PROMPT)
    changed = {second([*PROMPT[:i], 99, *PROMPT[i + 1 :]]) for i in range(5)}
    changed |= {second([12, 11, 13, 14, 15]), second(PROMPT, seed=1), second(PROMPT, seed=1 << 40)}
    assert base not in changed and len(changed) == 8
    chunked = worker_after(
        make_plan(
            1, [(2, 0, 3, [0, 1, 2])], sample=[], deltas=[(2, 0, 0)], runs={2: (0, PROMPT[:3])}, admit={2: 0}
        ),
        make_plan(2, [(2, 3, 5, [3, 12])], deltas=[(2, 4, 12)], runs={2: (3, PROMPT[3:])}, pad=3),
    )  # fmt: skip
    assert chunked.execute(make_plan(3, [(2, 5, 6, [13])], num_decode=1)).tokens[0] == base


def test_a_twin_in_the_same_step_reads_what_the_step_stores() -> None:
    """Whatever the order of the entries; the twin brings only its last token."""
    for entries in ([(0, 0, 5, [8, 9, 10, 11, 4]), (1, 4, 5, [16])], [(1, 4, 5, [16]), (0, 0, 5, [8, 9, 10, 11, 4])]):
        plan = prefill(
            entries=entries, deltas=[(0, 0, 8), (0, 4, 4), (1, 0, 8), (1, 4, 16)],
            runs={0: (0, PROMPT), 1: (4, PROMPT[4:])}, admit={0: 0, 1: 0},
        )  # fmt: skip
        tokens = worker_after().execute(plan).tokens
        assert tokens[0] == tokens[1]


def test_suppressed_ids_are_not_sampled_before_their_position() -> None:
    free = int(worker_after().execute(prefill()).tokens[0])
    for until, same in ((5, True), (6, False)):
        token = int(worker_after().execute(prefill(suppress={0: (until, [free])})).tokens[0])
        assert (token == free) is same


def test_eos_probability() -> None:
    contents = np.arange(20_000, dtype=np.uint64)
    keys = np.zeros_like(contents)
    share = (FakeModel(1000, eos_token_id=7, eos_probability=0.25).next_tokens(contents, keys) == 7).mean()
    assert 0.24 < share < 0.27
    assert (FakeModel(1000, eos_token_id=7, eos_probability=1.0).next_tokens(contents, keys) == 7).all()
    assert len(np.unique(FakeModel(1000).next_tokens(contents, keys))) == 1000


WRONG: dict[str, tuple[list[StepPlan], StepPlan, str]] = {
    "step twice": ([prefill()], decode(1), "arrived after"),
    "step lost": ([prefill()], decode(3), "arrived after"),
    "no sampling entry": ([], prefill(admit={}), "never given sampling"),
    "out_loc off by one": ([prefill()], decode(entries=[(0, 5, 6, [6])]), "page table names"),
    "no page": ([], prefill(deltas=[(0, 0, 8)]), "page table names"),
    "unaligned page": ([], prefill(deltas=[(0, 0, 9), (0, 4, 4)]), "unaligned"),
    "page outside the pool": ([], prefill(deltas=[(0, 0, 32), (0, 4, 4)]), "out of range"),
    "dummy row used": ([], prefill(entries=[(4, 0, 5, [8, 9, 10, 11, 4])]), "rows repeat or leave"),
    "row twice": ([prefill()], decode(entries=[(0, 5, 6, [5]), (0, 5, 6, [5])], num_decode=2), "rows repeat"),
    "prefill without tokens": ([], prefill(runs={}), "without its tokens"),
    "run of other positions": ([], prefill(runs={0: (1, PROMPT)}), "token run has"),
    "run without an entry": ([], prefill(runs={0: (0, PROMPT), 1: (0, [1])}), "without an entry"),
    "decode of an unknown token": ([prefill(sample=[])], decode(), "the device knows 5"),
    "decode position skipped": ([prefill()], decode(entries=[(0, 6, 7, [6])]), "the device knows 6"),
    "host token that the device has": ([prefill()], decode(num_decode=0, runs={0: (5, [1])}), "device already has"),
    "budget": ([], make_plan(1, [(0, 0, 33, [0] * 33)]), "bad lengths|exceed"),
    "decode of two tokens": ([prefill()], decode(entries=[(0, 5, 7, [5, 6])]), "decode entries"),
    "stale page of the row's last owner": (
        [prefill()],
        make_plan(2, [(0, 4, 5, [20])], deltas=[(0, 4, 20)], runs={0: (4, [9])}, admit={0: 0}),
        "has no page",
    ),
    "prefix never stored": (
        [prefill()],
        make_plan(2, [(1, 4, 5, [20])], deltas=[(1, 0, 16), (1, 4, 20)], runs={1: (4, [9])}, admit={1: 0}),
        "another sequence",
    ),
    "prefix at other positions": (
        [prefill(tokens=[*PROMPT, 16, 17, 18], entries=[(0, 0, 8, [8, 9, 10, 11, 4, 5, 6, 7])])],
        make_plan(2, [(1, 4, 5, [20])], deltas=[(1, 0, 4), (1, 4, 20)], runs={1: (4, [9])}, admit={1: 0}),
        "which holds position 4",
    ),
    "shared tail overwritten": (
        [
            prefill(),
            make_plan(2, [(1, 4, 5, [4])], deltas=[(1, 0, 8), (1, 4, 4)], runs={1: (4, [99])}, admit={1: 0}),
        ],
        decode(3),
        "another sequence",
    ),
    "one slot for two rows": (
        [],
        prefill(
            entries=[(0, 0, 5, [8, 9, 10, 11, 4]), (1, 0, 1, [4])], deltas=[(0, 0, 8), (0, 4, 4), (1, 0, 4)],
            runs={0: (0, PROMPT), 1: (0, [1])}, admit={0: 0, 1: 0},
        ),
        "stored in one slot",
    ),
    "page taken from a row of the same step": (
        [prefill()],
        make_plan(
            2, [(0, 5, 6, [5]), (1, 0, 1, [8])], num_decode=1, deltas=[(1, 0, 8)], runs={1: (0, [1])}, admit={1: 0}
        ),
        "another sequence",
    ),
    "two rows wait for each other": (
        [],
        make_plan(
            1, [(0, 4, 5, [4]), (1, 4, 5, [8])], deltas=[(0, 0, 8), (0, 4, 4), (1, 0, 4), (1, 4, 8)],
            runs={0: (4, [1]), 1: (4, [1])}, admit={0: 0, 1: 0},
        ),
        "wait for each other",
    ),
    "suppress run of a row that is not admitted": ([prefill()], decode(suppress={0: (9, [1])}), "not admitted"),
    "sampling entry of no row": ([], prefill(admit={0: 0, 5: 0}), "sampling entries"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_refused(name: str) -> None:
    before, plan, message = WRONG[name]
    worker = worker_after(*before)
    with pytest.raises(FakeWorkerError, match=message):
        worker.execute(plan)


def test_a_decode_row_may_not_read_what_the_same_step_stores() -> None:
    """A graph runs decode rows ahead of prefill rows, so their prefix must be there before the step."""
    worker = worker_after(
        prefill(),
        make_plan(2, [(1, 0, 4, [16, 17, 18, 19])], deltas=[(1, 0, 16)], runs={1: (0, PROMPT[:4])}, admit={1: 0}),
    )
    wrong = make_plan(
        3, [(0, 5, 6, [5]), (2, 0, 4, [8, 9, 10, 11])], num_decode=1, deltas=[(2, 0, 8)], runs={2: (0, PROMPT[:4])},
        admit={2: 0},
    )  # fmt: skip
    with pytest.raises(FakeWorkerError, match="stored in this step"):
        worker.execute(wrong)


@pytest.mark.parametrize("full_check", [True, False])
@pytest.mark.parametrize("slot", [8, 9, 4])
def test_a_slot_changed_behind_the_rows_back_is_found(full_check: bool, slot: int) -> None:
    worker = FakeWorker(CONFIG, full_check=full_check)
    worker.execute(prefill())
    worker.slot_content[slot] += np.uint64(1)
    if not full_check and slot != 4:
        worker.execute(decode())  # the light check looks at the last stored slot only
    else:
        with pytest.raises(FakeWorkerError, match=f"reads slot {slot}"):
            worker.execute(decode())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda plan: plan.rows.__setitem__(-1, 3),
        lambda plan: plan.out_loc.__setitem__(-1, 0),
        lambda plan: plan.device_len.__setitem__(-1, 2),
        lambda plan: plan.sample.__setitem__(-1, 0),
    ],
)
def test_padding_must_name_the_dummy_row_and_page(spoil: Callable[[StepPlan], None]) -> None:
    worker = worker_after(prefill())
    plan = decode(pad=3)
    spoil(plan)
    with pytest.raises(FakeWorkerError, match="padding"):
        worker.execute(plan)
