"""Tensor parallelism through real Ray actors: the tokens of TP 2 and 4 are those of transformers and of TP 1."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster import LLM, SamplingParams
from tests.checkpoints import FAMILIES as ALL_FAMILIES
from tests.checkpoints import load_reference, make_checkpoint
from tests.multi_gpu.conftest import Setting
from tests.references import first_wrong_greedy_token

pytestmark = pytest.mark.usefixtures("private_ray")

FAMILIES = {2: "llama", 4: "qwen3"}
TIES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 1.5}  # scores may be off by this; of other tokens they are 6 lower
PROMPTS = [[5, 6, 7], list(range(3, 60)), [9] * 17, list(range(50, 3, -3)), [7]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("tp")
    # a vocabulary that no size divides; eight query and two KV heads, so TP 4 replicates KV heads
    return {size: make_checkpoint(family, root / family) for size, family in FAMILIES.items()}


@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=pytest.mark.full_grid)])
def test_tokens_agree_with_transformers_and_with_one_rank(
    checkpoints: dict[int, Path], setting: Setting, tp_size: int
) -> None:
    if reason := setting.missing(tp_size):
        pytest.skip(reason)
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=11, max_tokens=24, ignore_eos=True)
    common = {"model": str(checkpoints[tp_size]), "dtype": "float32", "max_seq_len": 128, "num_pages": 128}
    common |= {"page_size": 4, "max_running_requests": 8, "max_step_tokens": 32, "gpu_memory_utilization": 0.5}
    outputs = {}
    for size in (tp_size, 1):
        where = setting.config(size) if size > 1 else {"device": setting.device}
        with LLM(**common, **where) as llm:
            outputs[size] = [llm.generate(PROMPTS, params, progress=False) for params in (greedy, sampled)]
            ranks = llm.info.ranks
        assert len(ranks) == len({rank.pid for rank in ranks}) == size
    reference = load_reference(checkpoints[tp_size])
    with torch.inference_mode():
        for output in outputs[tp_size][0]:
            assert first_wrong_greedy_token(reference, output.prompt_token_ids, output.token_ids, 1e-4) is None
    one, many = ([o.token_ids for o in outputs[size][1]] for size in (1, tp_size))
    assert many == one


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_have_the_cards_ray_gave_them(checkpoints: dict[int, Path], setting: Setting, tp_size: int) -> None:
    if setting.device == "cpu":
        pytest.skip("the ranks of this variant have no cards")
    if reason := setting.missing(tp_size):
        pytest.skip(reason)
    with LLM(
        str(checkpoints[tp_size]), max_seq_len=128, num_pages=64, max_running_requests=4, **setting.config(tp_size)
    ) as llm:
        cards = [rank.gpu_ids for rank in llm.info.ranks]
    assert all(len(card) == 1 for card in cards)
    if setting.gpus_per_rank == 1.0:
        assert len(set(cards)) == tp_size


@pytest.mark.parametrize(
    ("family", "dtype", "kv_heads"),
    [(family, "float32", 2) for family in ALL_FAMILIES]
    + [("llama", "bfloat16", 2), ("qwen3", "float16", 2), ("qwen3", "float32", 1)],  # one KV head: both ranks hold it
)
def test_all_families_on_cards(family: str, dtype: str, kv_heads: int, setting: Setting, tmp_path: Path) -> None:
    """Long prompts in large steps: messages of every size are reduced; decodes and small steps run as graphs."""
    if setting.gpus_per_rank != 1.0:
        pytest.skip("the other variants have no NCCL; their tokens are compared above")
    if reason := setting.missing(2):
        pytest.skip(reason)
    path = make_checkpoint(
        family, tmp_path, hidden_size=512, num_attention_heads=8, num_key_value_heads=kv_heads,
        max_position_embeddings=1024,
    )  # fmt: skip
    rng = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 100, (length,), generator=rng).tolist() for length in (900, 700, 500, 40, 1)]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(
        str(path), dtype=dtype, max_seq_len=1024, max_running_requests=8, max_step_tokens=2048,
        gpu_memory_utilization=0.5, **setting.config(2),
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, greedy, progress=False)
    reference = load_reference(path)
    with torch.inference_mode():
        for output in outputs:
            assert first_wrong_greedy_token(reference, output.prompt_token_ids, output.token_ids, TIES[dtype]) is None
