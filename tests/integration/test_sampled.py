"""Sampled tokens are those of the request alone, in a batch of 32, at any TP size and overlap.

CI takes a tiny checkpoint at TP 1 and 2; SmolLM2 at TP 1 and 3 by hand: `pytest -m full_grid -s` on this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cluster.model_files import resolve_model
from cluster.tokenizer import Tokenizer
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from tests.alone import Alone
from tests.checkpoints import load_reference, make_checkpoint
from tests.integration.shared_group import SharedGroups, shared_groups
from tests.references import chi_square, next_probabilities

pytestmark = pytest.mark.usefixtures("private_ray")

BATCH = 32
KINDS = {"plain": {}, "filtered": {"top_p": 0.9, "top_k": 40}}


@pytest.fixture(scope="module")
def groups(private_ray: None) -> Iterator[SharedGroups]:
    with shared_groups() as groups:
        yield groups


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vocabulary is large enough for the filters to cut, and odd."""
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("sampled"), vocab_size=2053, num_key_value_heads=4)


@pytest.fixture(scope="module")
def tiny_alone(tiny: Path) -> Iterator[Alone]:
    alone = Alone(tiny, 128)
    yield alone
    print(f"\n{alone.compared}")


def make_requests(prompts: list[list[int]], kind: str, max_tokens: int) -> list[Request]:
    return [
        Request(
            number,
            np.array(prompt),
            SamplingParams(temperature=0.8, seed=2**40 + number, max_tokens=max_tokens, ignore_eos=True, **KINDS[kind]),
        )
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_alone_and_in_a_batch_of_32(groups, tiny, tiny_alone, tp: int, overlap: int, kind: str) -> None:
    group = groups.get(tiny, tp_size=tp, page_size=4, max_seq_len=128, max_running_requests=BATCH, num_pages=1024)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 2053, rng.integers(1, 60)).tolist() for _ in range(BATCH)]
    requests = make_requests(prompts, kind, 24)
    served = group.serve(requests, overlap_depth=overlap)
    for request in requests:
        tiny_alone.compare(request, served.tokens[request.request_id], served.finish[request.request_id])
    alone = group.serve(requests[:1], overlap_depth=overlap)  # and alone on these ranks
    tiny_alone.compare(requests[0], alone.tokens[0], alone.finish[0])


@pytest.mark.parametrize("kind", KINDS)
def test_distribution(groups, tiny, kind: str) -> None:
    """Seeds 0 .. 4095 against softmax, with the least likely tokens pooled."""
    prompt, draws = [5, 6, 7, 8, 9], 4096
    requests = [
        Request(
            seed,
            np.array(prompt),
            SamplingParams(temperature=0.8, seed=seed, max_tokens=1, ignore_eos=True, **KINDS[kind]),
        )
        for seed in range(draws)
    ]
    group = groups.get(tiny, tp_size=2, page_size=4, max_seq_len=128, max_running_requests=BATCH, num_pages=1024)
    served = group.serve(requests)
    counts = np.bincount([tokens[0] for tokens in served.tokens.values()], minlength=2053)
    probabilities = next_probabilities(load_reference(tiny), prompt, 0.8)
    if kind == "filtered":
        best = np.argsort(-probabilities)[:40]
        mass = np.cumsum(probabilities[best]) / probabilities[best].sum()
        kept = best[: np.searchsorted(mass, 0.9) + 1]
        probabilities = np.where(np.isin(np.arange(len(probabilities)), kept), probabilities, 0)
    assert abs(chi_square(counts, probabilities / probabilities.sum())) < 4


TEXTS = [
    "The",
    "Once upon a time",
    "My favourite food is",
    "In 1969, people",
    "import",
    "Dear diary,",
    "Q: Why?\nA:",
    "A",
]


@pytest.mark.full_grid
@pytest.mark.timeout(0)
@pytest.mark.parametrize("tp", [1, 3])
def test_smollm2(groups, tp: int) -> None:
    path = resolve_model(None)
    alone = Alone(path, 128)
    tokenizer = Tokenizer(path)
    prompts = [tokenizer.encode(TEXTS[number % len(TEXTS)]) for number in range(BATCH)]
    group = groups.get(path, tp_size=tp, page_size=16, max_seq_len=128, max_running_requests=BATCH, num_pages=256)
    for kind in KINDS:
        requests = make_requests(prompts, kind, 32)
        for overlap in (1, 2):
            served = group.serve(requests, overlap_depth=overlap)
            for request in requests:
                alone.compare(request, served.tokens[request.request_id], served.finish[request.request_id])
    print(f"\n{alone.compared}")
