"""`LLM` with SmolLM2: tokens, texts, counters, refusals, and its ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cluster import LLM, SamplingParams
from cluster.errors import ConfigError, EngineClosedError, InvalidRequestError
from tests.references import first_wrong_greedy_token

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "1, 2, 3, 4,",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "In a distant future, people live on Mars. They",
    "Q: What is the largest planet of the solar system?\nA:",
]
TOKENS = 64
TIE = 1e-4


@pytest.fixture(scope="session")
def reference():
    import torch

    from cluster.model_files import resolve_model
    from tests.checkpoints import load_reference

    torch.set_num_threads(1)
    return load_reference(resolve_model(None))


def smollm2(tp: int = 1, **config: object) -> LLM:
    return LLM(tp_size=tp, device="cpu", max_seq_len=256, max_running_requests=8, **config)


@pytest.mark.usefixtures("private_ray")
class TestGreedy:
    """Other settings: test_greedy."""

    @pytest.mark.parametrize(
        "config",
        [
            {"tp": 1, "cache_type": "radix", "page_size": 16, "max_step_tokens": 512, "overlap_depth": 2},
            pytest.param(
                {"tp": 3, "cache_type": "naive", "page_size": 4, "max_step_tokens": 7, "overlap_depth": 1},
                marks=pytest.mark.full_grid,
            ),
        ],
        ids=str,
    )
    def test_tokens_are_transformers_tokens(self, reference, config) -> None:
        import torch

        with smollm2(integrity_interval=1, **config) as llm:
            greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
            outputs = llm.generate(PROMPTS, greedy, progress=False)
        with torch.inference_mode():
            for output in outputs:
                assert len(output.token_ids) == TOKENS and output.finish_reason == "length"
                assert first_wrong_greedy_token(reference, output.prompt_token_ids, output.token_ids, TIE) is None


@pytest.fixture(scope="module")
def llm(private_ray):
    with smollm2() as llm:
        yield llm


class TestGenerate:
    def test_text_reason_and_cached_tokens(self, llm: LLM) -> None:
        ids = llm.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
        greedy = SamplingParams(temperature=0.0, max_tokens=32)
        first = llm.generate(ids, greedy, progress=False)[0]
        assert "Paris" in first.text and first.finish_reason == "stop"
        assert first.token_ids[-1] in llm.info.eos_token_ids and "<|im_end|>" not in first.text
        assert first.prompt_token_ids == ids
        again = llm.generate([ids], [greedy], progress=False)[0]
        assert again.token_ids == first.token_ids
        assert again.cached_tokens == (len(ids) - 1) // 16 * 16

    def test_a_second_turn_finds_the_first(self, llm: LLM) -> None:
        question = {"role": "user", "content": "Name three rivers in Europe, and the countries they flow through."}
        greedy = SamplingParams(temperature=0.0, max_tokens=40)
        first = llm.generate(llm.tokenizer.apply_chat_template([question]), greedy, progress=False)[0]
        answer = {"role": "assistant", "content": first.text}
        turn = llm.tokenizer.apply_chat_template([question, answer, {"role": "user", "content": "Which is longest?"}])
        second = llm.generate(turn, greedy, progress=False)[0]
        assert second.cached_tokens >= len(first.prompt_token_ids) // 16 * 16 > 0
        assert second.cached_tokens < len(turn)

    @pytest.mark.parametrize("length", [97, 112, 113])
    def test_16_identical_prompts_prefill_what_the_formula_says(self, llm: LLM, length: int) -> None:
        prompt = [1000 + length + number for number in range(length)]
        before = llm.stats()
        params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=4, ignore_eos=True) for seed in range(16)]
        outputs = llm.generate([prompt] * 16, params, progress=False)
        after = llm.stats()
        shared = (length - 1) // 16 * 16
        assert after["prefilled_tokens"] - before["prefilled_tokens"] == length + 15 * (length - shared)
        assert after["cached_tokens"] - before["cached_tokens"] == 15 * shared
        assert sorted(output.cached_tokens for output in outputs) == [0] + [shared] * 15

    def test_a_stop_string_ends_text_and_request(self, llm: LLM) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=64, stop=[", 7"])
        output = llm.generate("1, 2, 3, 4,", params, progress=False)[0]
        assert output.text == " 5, 6" and output.finish_reason == "stop" and len(output.token_ids) < 20
        [output] = llm.generate("1, 2, 3, 4,", params.model_copy(update={"min_tokens": 30}), progress=False)
        assert output.text.startswith(" 5, 6, 7, 8") and len(output.token_ids) > 30

    def test_sampled_tokens_do_not_depend_on_the_batch(self, llm: LLM) -> None:
        params = [SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=n, max_tokens=16) for n in range(6)]
        together = llm.generate([PROMPTS[0]] * 6, params, progress=False)
        alone = [llm.generate(PROMPTS[0], one, progress=False)[0] for one in params]
        assert [o.token_ids for o in together] == [o.token_ids for o in alone]
        assert len({tuple(o.token_ids) for o in together}) > 1

    def test_logprobs_are_those_of_transformers(self, llm: LLM, reference) -> None:
        import torch

        params = SamplingParams(
            temperature=0.7, seed=1, max_tokens=12, logprobs=5, prompt_logprobs=3, repetition_penalty=1.2,
            logit_bias={"28": 2.0},
        )  # fmt: skip
        output = llm.generate(PROMPTS[5], params, progress=False)[0]
        ids = output.prompt_token_ids + output.token_ids
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        start = len(output.prompt_token_ids)
        assert output.prompt_logprobs[0] is None
        assert (len(output.prompt_logprobs), len(output.logprobs)) == (start, len(output.token_ids))
        for position, (token, top) in enumerate(
            zip(ids[1:], [*output.prompt_logprobs[1:], *output.logprobs], strict=True)
        ):
            row, wanted = expected[position], 3 if position < start - 1 else 5
            assert next(iter(top)) == token and wanted <= len(top) <= wanted + 1
            assert all(abs(row[i].item() - one.logprob) < 1e-3 for i, one in top.items())
            best = sorted((one.logprob for one in top.values() if one.rank <= wanted), reverse=True)
            assert best == pytest.approx(row.topk(wanted).values.tolist(), abs=1e-3)
        plain = llm.generate(PROMPTS[5], SamplingParams(temperature=0.0, max_tokens=2), progress=False)[0]
        assert plain.logprobs is None and plain.prompt_logprobs is None and plain.cached_tokens > 0
        again = llm.generate(PROMPTS[5], params, progress=False)[0]
        assert again.cached_tokens == 0 and again.token_ids == output.token_ids

    def test_bias_and_penalties_reach_the_workers(self, llm: LLM) -> None:
        params = [
            SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logit_bias={19: 100.0}),
            SamplingParams(
                temperature=0.0, max_tokens=8, ignore_eos=True, logit_bias={19: 100.0}, frequency_penalty=2.0
            ),
            SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, repetition_penalty=100.0),
        ]
        biased, _, penalised = llm.generate([PROMPTS[2]] * 3, params, progress=False)
        assert biased.token_ids == [19] * 8
        assert len(set(penalised.token_ids)) == 30
        with pytest.raises(InvalidRequestError, match="logit_bias names token id 49152"):
            llm.generate([1], SamplingParams(logit_bias={49152: 1.0}), progress=False)

    def test_without_a_seed_every_request_gets_its_own(self, llm: LLM) -> None:
        outputs = llm.generate([PROMPTS[1]] * 4, SamplingParams(max_tokens=16), progress=False)
        assert len({tuple(o.token_ids) for o in outputs}) == 4

    def test_more_prompts_than_rows_and_queue(self, private_ray) -> None:
        with smollm2(max_queued_requests=2) as llm:
            outputs = llm.generate([[5 + n] for n in range(30)], SamplingParams(max_tokens=2), progress=False)
        assert [o.prompt_token_ids for o in outputs] == [[5 + n] for n in range(30)]
        assert all(len(o.token_ids) == 2 or o.finish_reason == "stop" for o in outputs)

    def test_zero_tokens_and_no_prompts(self, llm: LLM) -> None:
        assert llm.generate([], progress=False) == []
        output = llm.generate("Hello", SamplingParams(max_tokens=0), progress=False)[0]
        assert output.token_ids == [] and output.text == "" and output.finish_reason == "length"

    @pytest.mark.parametrize("bad", [[], [1] * 300, [1 << 20], [-1]])
    def test_one_bad_prompt_is_named_and_nothing_runs(self, llm: LLM, bad: list[int]) -> None:
        before = llm.stats()["steps"]
        with pytest.raises(InvalidRequestError, match="prompt 1: "):
            llm.generate([[5, 6], bad], progress=False)
        assert llm.stats()["steps"] == before

    def test_one_sampling_params_for_each_or_one_for_all(self, llm: LLM) -> None:
        with pytest.raises(InvalidRequestError, match="2 prompts, but 3"):
            llm.generate([[5], [6]], [SamplingParams()] * 3, progress=False)

    def test_two_threads_take_turns(self, llm: LLM) -> None:
        results: dict[int, list[int]] = {}
        greedy = SamplingParams(temperature=0.0, max_tokens=8)

        def work(number: int) -> None:
            results[number] = llm.generate(PROMPTS[number], greedy, progress=False)[0].token_ids

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == {n: llm.generate(PROMPTS[n], greedy, progress=False)[0].token_ids for n in range(2)}

    def test_after_shutdown_it_says_so(self, private_ray) -> None:
        llm = smollm2()
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(EngineClosedError):
            llm.generate("Hello", progress=False)


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean num_pages"):
        LLM(num_page=3)


CHILD = """
import signal, threading, time
from cluster import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs are started with SIGINT ignored
if __name__ == "__main__":
    llm = LLM(device="cpu", ray_address="local", max_seq_len=2048, max_running_requests=4)
    def tell():
        while not llm.stats()["running"]:
            time.sleep(0.01)
        print(*(rank.pid for rank in llm.info.ranks), flush=True)
    threading.Thread(target=tell, daemon=True).start()
    try:
        llm.generate("Once", SamplingParams(max_tokens=2000, ignore_eos=True), progress=False)
    except KeyboardInterrupt:
        output = llm.generate("Once", SamplingParams(temperature=0.0, max_tokens=4), progress=False)[0]
        print(output.token_ids, flush=True)
"""


def test_ctrl_c_ends_the_call_and_leaves_the_engine_usable_and_nothing_behind() -> None:
    import psutil

    root = Path(__file__).parents[2]
    child = subprocess.Popen([sys.executable, "-c", CHILD], cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in child.stdout.readline().split()]
        assert pids
        os.kill(child.pid, signal.SIGINT)
        assert len(child.stdout.readline().split(",")) == 4
        assert child.wait(120) == 0  # without a shutdown() of ours
        assert not any(psutil.pid_exists(pid) for pid in pids)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
