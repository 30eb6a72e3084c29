"""Penalties, bias and log probabilities from `SamplingParams` to `StepOutputs`: the real scheduler and runner against a
plain loop over transformers' logits, under overlap, preemption, recovery and tensor parallelism."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from thread_group import ThreadGroup, run_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from scheduler.config import SchedulerConfig
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.step import LogprobBlock, StepPlan, StepResult
from worker.config import WorkerConfig
from worker.parallel import TPGroup
from worker.runner import ModelRunner
from worker.sampling.noise import gumbel, row_keys, seed_keys

torch.set_num_threads(1)
MAX_SEQ_LEN, ROWS, VOCAB = 64, 4, 97
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, LlamaForCausalLM]:
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=MAX_SEQ_LEN, initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tiny")
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(path)
    return str(path), model


@dataclass
class Stream:
    """What came back for one request."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[LogprobBlock] = field(default_factory=list)
    scores: LogprobBlock | None = None
    finish: FinishReason = FinishReason.NONE
    cached_tokens: int = 0

    @property
    def words(self) -> np.ndarray:
        return np.concatenate([block.words for block in self.blocks])


def make_runner(path: str, config: SchedulerConfig, tp: ThreadGroup | TPGroup) -> ModelRunner:
    worker = WorkerConfig(
        path, page_size=config.page_size, max_running_requests=config.max_running_requests,
        max_step_tokens=config.max_step_tokens, tp_size=tp.size, tp_rank=tp.rank,
    )  # fmt: skip
    runner = ModelRunner(worker, tp)
    runner.load()
    runner.allocate(config.num_pages)
    return runner


def take(outputs: StepOutputs, streams: dict[int, Stream]) -> None:
    assert not outputs.errors
    for request_id, token, finish, cached in zip(
        outputs.request_ids.tolist(), outputs.tokens.tolist(), outputs.finish.tolist(), outputs.cached_tokens.tolist(),
        strict=True,
    ):  # fmt: skip
        stream = streams[request_id]
        assert stream.finish == FinishReason.NONE
        stream.finish, stream.cached_tokens = FinishReason(finish), cached
        if token >= 0:
            stream.tokens.append(token)
    if outputs.logprobs is not None:
        for entry, words in zip(outputs.logprobs.index.tolist(), outputs.logprobs.block.words, strict=True):
            streams[int(outputs.request_ids[entry])].blocks.append(LogprobBlock(words[None].copy()))
    for request_id, block in outputs.prompt_logprobs.items():
        assert streams[request_id].scores is None and request_id in outputs.request_ids
        streams[request_id].scores = block


def serve(
    path: str, requests: list[Request], tp: ThreadGroup | TPGroup | None = None, lost_at: tuple[int, ...] = (),
    **settings: object,
) -> tuple[dict[int, Stream], Scheduler]:  # fmt: skip
    """Run all requests to their end. When step `lost_at` was launched the workers die and all is recovered."""
    tp = tp or TPGroup.single()
    base = {"page_size": 4, "num_pages": 100, "max_step_tokens": 64, "overlap_depth": 2, "max_running_requests": ROWS}
    config = SchedulerConfig(max_seq_len=MAX_SEQ_LEN, **(base | settings))
    scheduler, runner = Scheduler(config), make_runner(path, config, tp)
    streams = {request.request_id: Stream() for request in requests}
    for request in requests:
        scheduler.add(request)
    pending: deque = deque()
    while scheduler.has_work:
        plan = scheduler.schedule()
        if plan is not None:
            pending.append(runner.launch(StepPlan.decode(plan.buffer.tobytes())))
            scheduler.check_integrity()
            if plan.step_id in lost_at:
                pending.clear()
                scheduler.recover()
                runner = make_runner(path, config, tp)
                continue
            if len(pending) < config.overlap_depth:
                continue
        take(scheduler.process(StepResult.decode(pending.popleft().result().encode())), streams)
        take(scheduler.take_outputs(), streams)
    return streams, scheduler


def reference(model: LlamaForCausalLM, request: Request) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Tokens, raw log probabilities at each of them [n, vocab], and of the prompt [prompt - 1, vocab]."""
    params = request.sampling
    ids = request.prompt_ids.tolist()
    start, rows, prompt_rows = len(ids), [], torch.empty(0, VOCAB)
    while len(ids) < start + max(params.max_tokens, 1):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0].float()
        if len(ids) == start:
            prompt_rows = logits[:-1].log_softmax(-1)
            if params.max_tokens == 0:
                break
        logits = logits[-1].clone()
        rows.append(logits.log_softmax(-1))
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        counts = torch.bincount(torch.tensor(ids[start:], dtype=torch.int64), minlength=VOCAB)
        seen = torch.bincount(torch.tensor(ids), minlength=VOCAB) > 0
        scaled = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(seen, scaled, logits)
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        if params.temperature:
            words = torch.tensor([params.seed & 0xFFFFFFFF, params.seed >> 32], dtype=torch.int32)
            key = row_keys(seed_keys(words[:1], words[1:]), torch.tensor([len(ids)]))
            logits = logits / params.temperature + gumbel(*key, torch.arange(VOCAB, dtype=torch.int32))
        ids.append(int(logits.argmax()))
    return ids[start:], torch.stack(rows) if rows else torch.empty(0, VOCAB), prompt_rows


def check_block(block: LogprobBlock, tokens: list[int], expected: torch.Tensor, top: int) -> None:
    assert len(block) == len(tokens) and block.top >= top
    for i, token in enumerate(tokens):
        row = expected[i]
        assert abs(block.logprobs[i] - row[token].item()) < TOLERANCE
        assert abs(block.ranks[i] - 1 - int((row > row[token]).sum())) <= 1
        best = row.topk(top)
        np.testing.assert_allclose(block.top_logprobs[i, :top], best.values, atol=TOLERANCE)
        np.testing.assert_allclose(row[block.top_ids[i, :top].tolist()], best.values, atol=TOLERANCE)


def check(model: LlamaForCausalLM, requests: list[Request], streams: dict[int, Stream]) -> None:
    for request in requests:
        stream, params = streams[request.request_id], request.sampling
        tokens, rows, prompt_rows = reference(model, request)
        assert stream.tokens == tokens, request.request_id
        assert stream.finish == FinishReason.LENGTH
        if params.logprobs is None:
            assert not stream.blocks
        else:
            check_block(LogprobBlock(wide(stream.blocks, params.logprobs)), tokens, rows, params.logprobs)
        prompt = request.prompt_ids.tolist()[1:]
        if params.prompt_logprobs is None or not prompt:
            assert stream.scores is None
        else:
            assert stream.scores.top == params.prompt_logprobs
            check_block(stream.scores, prompt, prompt_rows, params.prompt_logprobs)


def wide(blocks: list[LogprobBlock], top: int) -> np.ndarray:
    """Blocks of steps with other requests, which may want more, brought to one width."""
    return np.concatenate([block.narrowed(top).words for block in blocks])


def make_requests() -> list[Request]:
    """Nine requests over four rows; prompts share prefixes and repeat tokens."""
    rng = np.random.default_rng(2)
    shared = rng.integers(0, VOCAB, 11).tolist()
    settings = [
        {"repetition_penalty": 1.8},
        {"frequency_penalty": 1.5, "presence_penalty": -1.0, "logprobs": 3},
        {"logit_bias": {5: 4.0, 90: 6.5, 17: -100.0}, "logprobs": 0},
        {"prompt_logprobs": 4},
        {},
        {"presence_penalty": 2.0, "frequency_penalty": 0.3, "repetition_penalty": 0.7, "logit_bias": {96: 3.0},
         "logprobs": 20, "prompt_logprobs": 0, "temperature": 0.9},
        {"prompt_logprobs": 2, "max_tokens": 0},
        {"temperature": 1.1, "logprobs": 1, "prompt_logprobs": 1},
        {"prompt_logprobs": 1, "repetition_penalty": 1.3},
    ]  # fmt: skip
    requests = []
    for index, (length, given) in enumerate(zip([3, 5, 20, 12, 9, 3, 22, 9, 1], settings, strict=True)):
        own = rng.integers(0, 9, length).tolist()
        params = SamplingParams(
            **{"temperature": 0.0, "max_tokens": 9 + index, "seed": 100 + index, "ignore_eos": True} | given
        )
        prompt = (shared if index % 2 == 0 and length > 1 else []) + own
        requests.append(Request(index, np.array(prompt), params))
    return requests


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap_depth": 1},
        {"overlap_depth": 2},
        {"page_size": 1, "num_pages": 400, "max_step_tokens": 512},
        {"num_pages": 20, "max_step_tokens": 7},  # preempts; prompts in many chunks
        {"max_step_tokens": 5, "cache_type": "naive"},
        {"lost_at": (2, 5, 6, 14, 20)},
        {"lost_at": (3, 4, 9, 22), "num_pages": 20, "max_step_tokens": 9, "overlap_depth": 1},
    ],
    ids=str,
)
def test_equal_to_a_plain_loop_over_transformers(checkpoint, settings: dict) -> None:
    path, model = checkpoint
    requests = make_requests()
    streams, scheduler = serve(path, requests, **settings)
    check(model, requests, streams)
    if settings.get("num_pages") == 20:
        assert scheduler.stats().preemptions > 0


@pytest.mark.parametrize("tp_size", [2])
@pytest.mark.parametrize(
    "settings", [{"overlap_depth": 1}, {"num_pages": 20, "max_step_tokens": 7}, {"lost_at": (5, 12)}], ids=str
)
def test_the_vocabulary_may_be_sharded(checkpoint, tp_size: int, settings: dict) -> None:
    path, model = checkpoint
    requests = make_requests()
    ranks = run_ranks(tp_size, lambda tp: serve(path, make_requests(), tp, **settings)[0])
    check(model, requests, ranks[0])
    for other in ranks[1:]:
        for request_id, stream in ranks[0].items():
            assert other[request_id].tokens == stream.tokens
            if stream.blocks:
                np.testing.assert_array_equal(wide(other[request_id].blocks, 0), wide(stream.blocks, 0))


def test_a_request_with_prompt_logprobs_matches_no_prefix(checkpoint) -> None:
    path, model = checkpoint
    prompt = np.random.default_rng(3).integers(0, VOCAB, 30)
    plain = SamplingParams(temperature=0.0, max_tokens=2, seed=0, ignore_eos=True)
    scored = plain.model_copy(update={"prompt_logprobs": 1})
    requests = [
        Request(0, prompt, plain),
        Request(1, prompt, scored),
        Request(2, prompt, plain),
        Request(3, prompt, scored),
    ]
    streams, scheduler = serve(path, requests, max_running_requests=1)
    check(model, requests, streams)
    assert [streams[i].cached_tokens for i in range(4)] == [0, 0, 28, 0]
    assert scheduler.stats().prefilled_tokens == 30 + 30 + 2 + 30


def test_a_resumed_request_counts_what_it_generated(checkpoint) -> None:
    """As after the death of a replica: the prompt and the first tokens come as one prompt, with `prompt_len`."""
    path, model = checkpoint
    params = SamplingParams(
        temperature=0.0, max_tokens=12, seed=0, ignore_eos=True, frequency_penalty=1.2, presence_penalty=0.5,
        repetition_penalty=1.4, logprobs=2,
    )  # fmt: skip
    prompt = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    whole = Request(0, prompt, params)
    tokens, rows, _ = reference(model, whole)
    resumed = Request(1, np.concatenate([prompt, tokens[:5]]), params, prompt_len=len(prompt))
    streams, _ = serve(path, [resumed])
    assert streams[1].tokens == tokens[5:]
    check_block(LogprobBlock(streams[1].words), tokens[5:], rows[5:], 2)


def test_rows_are_clean_for_the_next_request(checkpoint) -> None:
    path, model = checkpoint
    heavy = {
        "repetition_penalty": 5.0,
        "frequency_penalty": 2.0,
        "logit_bias": dict.fromkeys(range(40), 9.0),
        "logprobs": 2,
    }
    settings = [heavy, {}, heavy, {"frequency_penalty": 0.5}, {}]
    requests = [
        Request(i, np.array([7, 8, 9 + i]), SamplingParams(temperature=0.0, seed=0, max_tokens=6, ignore_eos=True, **s))
        for i, s in enumerate(settings)
    ]
    streams, _ = serve(path, requests, max_running_requests=1)
    check(model, requests, streams)


def test_nothing_is_allocated_or_sent_while_nobody_asks(checkpoint) -> None:
    path, _ = checkpoint
    config = SchedulerConfig(
        num_pages=40, page_size=4, max_running_requests=ROWS, max_seq_len=MAX_SEQ_LEN, max_step_tokens=64
    )
    scheduler, runner = Scheduler(config), make_runner(path, config, TPGroup.single())
    params = SamplingParams(
        temperature=0.0, seed=0, max_tokens=4, ignore_eos=True, repetition_penalty=1.0, logit_bias={}
    )
    scheduler.add(Request(0, np.array([1, 2, 3]), params))
    while (plan := scheduler.schedule()) is not None:
        assert plan.extras is None
        result = runner.launch(plan).result()
        assert result.logprobs is None and result.scores is None
        outputs = scheduler.process(result)
        assert outputs.logprobs is None and not outputs.prompt_logprobs
    assert not hasattr(runner._sampler.state.extras, "counts")
