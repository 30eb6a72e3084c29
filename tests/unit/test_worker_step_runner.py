"""`ModelRunner` on a tiny checkpoint, driven by plans written by hand: transformers' greedy tokens, and more."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hand_driver import HandDriver, HandRow
from thread_group import ThreadGroup, run_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from worker.config import WorkerConfig
from worker.errors import ModelError
from worker.memory import await_predecessor
from worker.parallel import TPGroup
from worker.runner import ModelRunner

torch.set_num_threads(1)
MAX_ROWS, NUM_PAGES, MAX_SEQ_LEN = 8, 64, 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, LlamaForCausalLM]:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=211, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=MAX_SEQ_LEN, initializer_range=0.3, eos_token_id=7,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    return str(path), model


def make_runner(path: str, page_size: int = 4, **settings: object) -> ModelRunner:
    config = WorkerConfig(
        model_path=path, page_size=page_size, max_running_requests=MAX_ROWS, max_step_tokens=128, **settings
    )
    runner = ModelRunner(config, TPGroup.single())
    runner.load()
    runner.allocate(NUM_PAGES * 4 // page_size)
    assert runner.warm_up() == ()
    return runner


def make_driver(page_size: int = 4) -> HandDriver:
    return HandDriver(MAX_ROWS, NUM_PAGES * 4 // page_size, page_size)


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(8, 211, length).tolist() for length in lengths]


def run(runner: ModelRunner, driver: HandDriver, rows: list[HandRow], steps: int, chunk: int = 1000) -> list[list[int]]:
    """Prefill in chunks of `chunk`, then decode until each row has `steps` new tokens; rows run side by side."""
    while any(len(row.tokens) < row.prompt_len + steps for row in rows):
        work = []
        for row in rows:
            left = len(row.tokens) - row.cached_len
            if left and len(row.tokens) < row.prompt_len + steps:
                work.append((row, min(chunk, left)))
        driver.process(runner.launch(driver.plan(work)).result())
    return [row.tokens[row.prompt_len :] for row in rows]


def reference(model: LlamaForCausalLM, prompt: list[int], steps: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=steps,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [3, 1000])
def test_greedy_tokens_equal_transformers(checkpoint, page_size: int, chunk: int) -> None:
    path, model = checkpoint
    runner, driver = make_runner(path, page_size), make_driver(page_size)
    rows = [driver.request(row, prompt) for row, prompt in zip([5, 0, 3], prompts(1, 9, 23), strict=True)]
    tokens = run(runner, driver, rows, 12, chunk)
    assert tokens == [reference(model, row.tokens[: row.prompt_len], 12) for row in rows]


def test_mixed_steps_and_rows_used_again(checkpoint) -> None:
    path, model = checkpoint
    runner, driver = make_runner(path), make_driver()
    first, second, third = (
        driver.request(row, prompt) for row, prompt in zip([0, 1, 0], prompts(5, 17, 8), strict=True)
    )
    driver.process(runner.launch(driver.plan([(first, 5)])).result())
    driver.process(runner.launch(driver.plan([(first, 1), (second, 7)])).result())  # decode beside a chunk
    driver.process(runner.launch(driver.plan([(first, 1), (second, 10)])).result())
    driver.release(first)
    driver.process(runner.launch(driver.plan([(second, 1), (third, 8)])).result())
    run(runner, driver, [second, third], 6)
    for row in (first, second, third):
        new = row.tokens[row.prompt_len :]
        assert new == reference(model, row.tokens[: row.prompt_len], len(new))


def test_sampled_tokens_are_the_same_alone_and_in_a_batch(checkpoint) -> None:
    path, _ = checkpoint
    settings = [
        {"temperature": 0.8, "seed": 11},
        {"temperature": 0.8, "seed": 2**63 + 5, "top_p": 0.9, "top_k": 40},
        {"temperature": 1.3, "seed": 7, "min_p": 0.02},
        {},
        {"temperature": 1.0, "seed": 9, "top_p": 0.7},
    ]
    texts = prompts(3, 12, 7, 5, 20)
    driver = make_driver()
    together = run(
        make_runner(path),
        driver,
        [driver.request(i, p, **s) for i, (p, s) in enumerate(zip(texts, settings, strict=True))],
        16,
    )
    for index, (prompt, setting) in enumerate(zip(texts, settings, strict=True)):
        driver = make_driver(16)
        alone = run(make_runner(path, 16), driver, [driver.request(7 - index, prompt, **setting)], 16, chunk=5)
        assert alone == [together[index]]


def test_a_resumed_request_goes_on_with_the_same_tokens(checkpoint) -> None:
    path, _ = checkpoint
    [prompt] = prompts(10)
    setting = {"temperature": 0.9, "seed": 4, "top_k": 30}
    driver = make_driver()
    [whole] = run(make_runner(path), driver, [driver.request(0, prompt, **setting)], 20)
    driver = make_driver()
    row = driver.request(2, prompt + whole[:9], **setting)
    [rest] = run(make_runner(path), driver, [row], 11)
    assert rest == whole[9:]


def test_min_tokens_suppresses_ids_until_the_position(checkpoint) -> None:
    path, model = checkpoint
    [prompt] = prompts(6)
    plain = reference(model, prompt, 8)
    banned = sorted(set(plain))
    driver = make_driver()
    row = driver.request(1, prompt, suppress=(6 + 4, banned))
    [tokens] = run(make_runner(path), driver, [row], 8)
    assert not set(tokens[:4]) & set(banned)
    assert tokens[4:] == reference(model, prompt + tokens[:4], 4)


def test_a_step_without_samples_is_answered(checkpoint) -> None:
    path, _ = checkpoint
    runner, driver = make_runner(path), make_driver()
    row = driver.request(0, prompts(9)[0])
    result = runner.launch(driver.plan([(row, 4)])).result()
    assert result.step_id == 1 and len(result.tokens) == 0


def test_a_plan_without_rows_is_answered(checkpoint) -> None:
    path, _ = checkpoint
    result = make_runner(path).launch(make_driver().plan([])).result()
    assert result.step_id == 1 and len(result.tokens) == 0


def test_padded_plans_run_without_graphs(checkpoint) -> None:
    path, model = checkpoint
    runner, driver = make_runner(path), make_driver()
    row = driver.request(0, prompts(9)[0])
    driver.process(runner.launch(driver.plan([(row, 9)])).result())
    for _ in range(3):
        driver.process(runner.launch(driver.plan([(row, 1)], padded_rows=4)).result())
    assert row.tokens[9:] == reference(model, row.tokens[:9], 4)


def test_model_info_and_max_pages(checkpoint) -> None:
    path, _ = checkpoint
    runner = make_runner(path)
    info = runner.model_info
    assert (info.vocab_size, info.max_seq_len, info.eos_token_ids, info.dtype) == (211, 64, (7,), "float32")
    assert info.page_bytes == 2 * 2 * 4 * 2 * 12 * 4
    assert runner.max_pages() == MAX_ROWS * (64 // 4)  # what all rows can use: memory holds more


def test_the_largest_step_runs_and_writes_the_dummy_page_only(checkpoint) -> None:
    path, model = checkpoint
    runner, driver = make_runner(path), make_driver()
    runner._run_largest_step()
    assert not runner._pool.k_cache(0)[:-1].any() and not runner._pool.v_cache(1)[:-1].any()
    rows = [driver.request(row, prompt) for row, prompt in zip([5, 0], prompts(3, 9), strict=True)]
    assert run(runner, driver, rows, 4) == [reference(model, row.tokens[: row.prompt_len], 4) for row in rows]


def test_a_restart_waits_for_memory_but_not_for_ever() -> None:
    device = mock.Mock()
    device.memory.side_effect = [(1, 10), (5, 10), (9, 10)]
    await_predecessor(device, 0.9, timeout=60.0)
    assert device.memory.call_count == 3
    device.memory.side_effect = lambda: (1, 10)
    await_predecessor(device, 0.9, timeout=0.1)


def test_clear_errors(checkpoint) -> None:
    path, _ = checkpoint
    with pytest.raises(ModelError, match="max_seq_len 65 exceeds"):
        make_runner(path, max_seq_len=65)
    with pytest.raises(ModelError, match=r"no memory for 1 KV pages: 0 MiB"):
        make_runner(path, cpu_memory_share=0.0).max_pages()
    with pytest.raises(ModelError, match=r"no memory for 1000000000 KV pages"):
        make_runner(path, num_pages=1_000_000_000).max_pages()
    with pytest.raises(ModelError, match=r"0 MiB are left .* smaller max_step_tokens \(now 1099511627776\)"):
        config = WorkerConfig(path, max_step_tokens=1 << 40, max_running_requests=1 << 20)
        ModelRunner(config, TPGroup.single()).max_pages()
    assert make_runner(path, num_pages=33).max_pages() == 33
    again = make_runner(path, num_pages=1_000_000_000, pages_fitted=True)  # of a recovery: not looked at again
    assert again.max_pages() == 1_000_000_000


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"kv_layout": "page_first"}], ids=str)
def test_other_dtypes_and_layouts(checkpoint, settings: dict) -> None:
    path, model = checkpoint
    runner, driver = make_runner(path, **settings), make_driver()
    rows = [driver.request(0, prompts(9)[0]), driver.request(1, prompts(4)[0], temperature=0.8, top_p=0.9, seed=1)]
    tokens = run(runner, driver, rows, 6)
    assert [len(new) for new in tokens] == [6, 6]
    if "dtype" in settings:  # other roundings than transformers', which random weights would amplify
        assert runner.model_info.dtype == "bfloat16" and runner._pool.dtype == torch.bfloat16
    else:
        assert tokens[0] == reference(model, rows[0].tokens[:9], 6)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_tensor_parallel_ranks_compute_the_same_tokens(checkpoint, tp_size: int) -> None:
    """Every rank answers alike, and as one rank alone does (4 ranks over 2 KV heads share them)."""
    path, _ = checkpoint
    texts = prompts(9, 4)
    settings = [{"temperature": 0.8, "seed": 3, "top_p": 0.9}, {}]

    def tokens(tp: ThreadGroup | TPGroup) -> list[list[int]]:
        config = WorkerConfig(path, tp_size=tp.size, tp_rank=tp.rank, page_size=4, max_running_requests=MAX_ROWS)
        runner, driver = ModelRunner(config, tp), make_driver()
        runner.load()
        runner.allocate(NUM_PAGES)
        rows = [driver.request(i, p, **s) for i, (p, s) in enumerate(zip(texts, settings, strict=True))]
        return run(runner, driver, rows, 12, chunk=5)

    assert run_ranks(tp_size, tokens) == [tokens(TPGroup.single())] * tp_size
