"""What the ingress asks of an engine for the choices of a request, with a handle in place of Serve's."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from cluster.config import EngineConfig
from cluster.serve import fleet
from cluster.serve.engine_call import EngineCall
from cluster.serve.engine_client import EngineClient
from cluster.serve.open_call import GroupOptions
from cluster.serve.router import TICKET
from cluster.tokenizer import Tokenizer
from scheduler.outputs import FinishReason
from scheduler.sampling_params import SamplingParams
from tests.unit import tiny_tokenizers


@pytest.fixture
async def calls(tmp_path):
    """(client, [(what was asked, ticket)])."""
    asked = []

    def remote(data, **options):
        asked.append((EngineCall.decode(data), options[TICKET]))
        return asyncio.Future()  # a call that stays open

    handle = SimpleNamespace(generate=SimpleNamespace(remote=remote))
    client = EngineClient(
        handle, Tokenizer(tiny_tokenizers.byte_level(tmp_path)), "node", "127.0.0.1", EngineConfig(page_size=16)
    )
    yield client, asked
    client.close()


async def test_the_choices_of_a_prompt_share_what_is_made_of_it(calls, monkeypatch):
    client, asked = calls
    hashed, hashes = [], fleet.prefix_hashes
    monkeypatch.setattr(fleet, "prefix_hashes", lambda ids, block: hashed.append(len(ids)) or hashes(ids, block))
    prompts = [list(range(200)), list(range(100))]
    sampling = SamplingParams(max_tokens=5, seed=0)
    pairs = [(prompt, sampling.model_copy(update={"seed": seed})) for prompt in prompts for seed in range(3)]
    group = client.open(pairs, GroupOptions(time.monotonic()))
    assert [call.prompt_ids.tolist() for call, _ in asked] == [prompt for prompt, _ in pairs]
    assert [call.sampling.seed for call, _ in asked] == [0, 1, 2] * 2
    assert [call.prompt_len for call, _ in asked] == [200] * 3 + [100] * 3
    assert hashed == [199, 99]
    assert len({id(ticket) for _, ticket in asked}) == 6
    for call, ticket in asked:
        expected = client.fleet.ticket(call.prompt_ids, 5)
        assert (ticket.hashes, ticket.work, ticket.prompt_len) == (expected.hashes, expected.work, call.prompt_len)
    group.streams[1].tokens.append(7)  # as when its engine is gone
    client._submit(group.streams[1])
    assert (asked[-1][0].prompt_ids.tolist(), asked[-1][0].prompt_len) == ([*prompts[0], 7], 200)
    assert asked[-1][1].work < asked[1][1].work + 1
    client.close_group(group)


async def test_a_stop_string_waits_for_the_least_number_of_tokens(calls):
    client, _ = calls
    letter = client._tokenizer.backend.token_to_id("a")
    sampling = SamplingParams(max_tokens=5, min_tokens=2, seed=0, stop="a")
    group = client.open([([1], sampling)], GroupOptions(time.monotonic()))
    deltas = [group.streams[0].advance(letter, FinishReason.NONE, 0, None) for _ in range(3)]
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("a", None), ("a", None), ("", "stop")]
    client.close_group(group)
