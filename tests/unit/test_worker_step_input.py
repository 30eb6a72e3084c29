"""Plans on the device: page table, token pool, batches of every shape, staging buffers, the warm-up's plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hand_driver import HandDriver

from scheduler.step import StepPlan
from worker.device import UPLOAD_BUFFERS, create_device
from worker.graphs.decode import decode_graph_sizes
from worker.page_table import PageTable
from worker.parallel import TPGroup
from worker.sampling import Sampler
from worker.step_input import StepInput, hot_views, hot_words, sample_targets
from worker.token_pool import TokenPool
from worker.warm_up import largest_step

ROWS, PAGES, MAX_SEQ_LEN = 6, 40, 30


class Rank:
    """The device state of one rank without a model."""

    def __init__(self, page_size: int) -> None:
        self.device = create_device("cpu", upload_words=16)
        place = self.device.torch_device
        self.page_table = PageTable(ROWS, MAX_SEQ_LEN, page_size, PAGES, place)
        self.tokens = TokenPool(ROWS, MAX_SEQ_LEN, page_size, place)
        self.sampler = Sampler(ROWS, 64, 0, TPGroup.single(), place)
        self.input = StepInput(self.device, self.page_table, self.tokens, self.sampler.state, ROWS, 32)

    def batch(self, plan: StepPlan):
        return self.input.batch(plan, self.input.load(plan))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_slots_and_tokens_follow_the_plans(page_size: int) -> None:
    rank, driver = Rank(page_size), HandDriver(ROWS, PAGES, page_size)
    first, second = driver.request(4, list(range(10, 21))), driver.request(1, [5, 6, 7])
    rank.batch(driver.plan([(first, 6)]))
    rank.batch(driver.plan([(second, 3), (first, 5)]))
    for row in (first, second):
        want = [row.pages[p // page_size] * page_size + p % page_size for p in range(row.cached_len)]
        positions = torch.arange(row.cached_len)
        assert rank.page_table.slots(torch.tensor(row.row), positions).tolist() == want
        assert rank.tokens.gather(torch.tensor(row.row), positions).tolist() == row.tokens
    assert rank.page_table.slots(torch.tensor([0, ROWS]), torch.tensor([3, 0])).min() >= PAGES * page_size


def test_batch_of_decodes_and_chunks() -> None:
    rank, driver = Rank(4), HandDriver(ROWS, PAGES, 4)
    a, b, c = driver.request(2, [11, 12, 13]), driver.request(5, list(range(20, 29))), driver.request(0, [31, 32])
    rank.batch(driver.plan([(a, 3), (b, 4)]))
    a.tokens.append(40)
    rank.tokens.scatter(torch.tensor([2]), torch.tensor([3]), torch.tensor([40], dtype=torch.int32))
    plan = driver.plan([(b, 5), (a, 1), (c, 1)], padded_rows=5)
    buffer = rank.input.load(plan)
    batch = rank.input.batch(plan, buffer)
    assert batch.input_ids.tolist() == [40, 24, 25, 26, 27, 28, 31]
    assert batch.positions.tolist() == [3, 4, 5, 6, 7, 8, 0]
    assert batch.rows.tolist() == [2, 5, 0]
    assert batch.cu_extend.tolist() == [0, 1, 6, 7]
    assert batch.sample_index.tolist() == [0, 5]  # c's chunk is not its last
    assert (batch.num_decode, batch.max_decode_len, batch.max_prefill_len, batch.max_extend_len) == (1, 4, 9, 5)
    assert batch.out_loc.tolist() == plan.out_loc[:7].tolist()
    assert [str(t.dtype) for t in (batch.input_ids, batch.positions, batch.out_loc, batch.sample_index)] == [
        "torch.int64"
    ] * 4
    assert [str(t.dtype) for t in (batch.rows, batch.cached_len, batch.device_len, batch.cu_extend)] == [
        "torch.int32"
    ] * 4
    rows, positions = sample_targets(hot_views(buffer, 5, 9), plan.num_samples)
    assert (rows.tolist(), positions.tolist()) == ([2, 5], [4, 9])


def test_outputs_are_the_sampled_tokens_as_decodes() -> None:
    rank, driver = Rank(4), HandDriver(ROWS, PAGES, 4)
    a, b, c = driver.request(2, [11, 12]), driver.request(5, list(range(20, 29))), driver.request(0, [31, 32])
    batch = rank.batch(driver.plan([(c, 1), (b, 9), (a, 2)]))
    outputs = batch.outputs
    assert outputs.input_ids.tolist() == [28, 12] == batch.input_ids[batch.sample_index].tolist()
    assert outputs.positions.tolist() == outputs.cached_len.tolist() == outputs.host_cached_len.tolist() == [8, 1]
    assert outputs.device_len.tolist() == outputs.host_device_len.tolist() == [9, 2]
    assert outputs.rows.tolist() == outputs.host_rows.tolist() == [5, 2]
    assert outputs.out_loc.tolist() == batch.out_loc[[9, 11]].tolist()
    assert outputs.cu_extend.tolist() == [0, 1, 2] and outputs.sample_index.tolist() == [0, 1]
    assert (outputs.num_decode, outputs.max_decode_len, outputs.max_extend_len) == (2, 9, 1)
    # Where nothing is sampled one token stands in.
    d = driver.request(1, list(range(40, 50)))
    batch = rank.batch(driver.plan([(d, 4)]))
    assert batch.sample_index.tolist() == [3] and batch.outputs.input_ids.tolist() == [43]
    # A decode step has no other tokens.
    a.tokens.append(7)
    assert rank.batch(driver.plan([(a, 1)])).outputs is None


def test_a_decode_batch_is_what_a_graph_sees() -> None:
    """From the hot part alone, copied to another buffer, padding included."""
    rank, driver = Rank(4), HandDriver(ROWS, PAGES, 4)
    rows = [driver.request(r, [r + 1, r + 2]) for r in (3, 1)]
    rank.batch(driver.plan([(r, 2) for r in rows]))
    for row in rows:
        row.tokens.append(50 + row.row)
        rank.tokens.scatter(torch.tensor([row.row]), torch.tensor([2]), torch.tensor([50 + row.row], dtype=torch.int32))
    plan = driver.plan([(r, 1) for r in rows], padded_rows=4)
    buffer = rank.input.load(plan)
    static = torch.zeros(hot_words(8, 8), dtype=torch.int32)
    static[: hot_words(4, 4)] = buffer[: hot_words(4, 4)]
    batch = rank.input.decode_batch(hot_views(static, 4, 4), MAX_SEQ_LEN)
    assert batch.input_ids.tolist() == [53, 51, 0, 0]
    assert batch.positions.tolist() == [2, 2, 0, 0]
    assert batch.rows.tolist() == [3, 1, ROWS, ROWS]
    assert batch.out_loc.tolist()[2:] == [PAGES * 4] * 2
    assert batch.sample_index.tolist() == [0, 1, 2, 3]
    live = rank.input.batch(plan, buffer)
    for name in ("input_ids", "positions", "out_loc", "rows", "cached_len", "device_len"):
        assert torch.equal(getattr(batch, name)[:2], getattr(live, name))


def test_uploads_alternate_and_grow() -> None:
    device = create_device("cpu", upload_words=4)
    arrays = [np.arange(n, dtype=np.int32) + n for n in (3, 50, 2)]
    views = [device.upload(words) for words in arrays[:UPLOAD_BUFFERS]]
    for words, view in zip(arrays, views, strict=False):
        assert view.tolist() == words.tolist()
    assert device.upload(arrays[2]).tolist() == [2, 3]
    assert views[1].tolist() == arrays[1].tolist()


def test_memory_numbers_are_sane() -> None:
    available, total = create_device("cpu").memory()
    assert 0 < available <= total


def test_a_container_limit_counts_without_its_file_cache(tmp_path, monkeypatch) -> None:
    for name, text in {
        "memory.max": "1000000\n", "memory.current": "900000\n", "memory.stat": "anon 5\ninactive_file 300000\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("worker.device.CGROUPS", [(tmp_path, "memory.max", "memory.current", "inactive_file")])
    assert create_device("cpu").memory() == (400_000, 1_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert create_device("cpu").memory()[1] > 1_000_000


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 300, 2000])
def test_graph_sizes(most: int) -> None:
    sizes = decode_graph_sizes(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == min(most, 512)
    assert len(sizes) <= 52


@pytest.mark.parametrize(("rows", "tokens"), [(4, 64), (8, 3), (1, 1), (2, 500)])
def test_the_largest_step_fits_its_limits_and_the_dummy_page(rows: int, tokens: int) -> None:
    plan = StepPlan.decode(largest_step(rows, MAX_SEQ_LEN, tokens, dummy_slot=160).buffer)
    assert plan.num_rows == min(rows, tokens) and plan.num_tokens <= tokens
    assert (plan.device_len <= MAX_SEQ_LEN).all() and (plan.device_len > plan.cached_len).all()
    assert int((plan.device_len - plan.cached_len).sum()) == plan.num_tokens == len(plan.out_loc)
    assert set(plan.out_loc.tolist()) == {160}
