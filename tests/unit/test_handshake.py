"""The driver's side of a start, with ranks whose messages come in any order."""

from __future__ import annotations

import random

import pytest

from cluster import messages
from cluster.handshake import Handshake
from cluster.progress import no_progress
from cluster.rank_startup import Whereabouts
from cluster.timeline import Timeline
from worker.config import WorkerConfig

RANKS = 3


def messages_of(rank: int) -> list[messages.Message]:
    hello = messages.Hello(messages.PROTOCOL_VERSION, "group", rank)
    place = [messages.Rendezvous("10.0.0.1", 1234)] if rank == 0 else []
    capacity = messages.Capacity(pages=10 + rank, vocab_size=9, max_seq_len=64, eos_token_ids=[2], dtype="float32")
    return [hello, messages.Progress("import", 0.0), *place, capacity, messages.Ready([])]


@pytest.mark.parametrize("seed", range(30))
def test_every_rank_is_answered_after_its_hello_whoever_is_faster(seed: int) -> None:
    rng, sent = random.Random(seed), {rank: [] for rank in range(RANKS)}
    places = tuple(Whereabouts("node", "10.0.0.1", 100 + rank, ()) for rank in range(RANKS))
    worker = WorkerConfig("model", tp_size=RANKS)
    greeted: set[int] = set()

    def send(rank: int, message: messages.Message) -> None:
        assert rank in greeted, "the rank has not connected: the send would fail"
        sent[rank].append(type(message))

    handshake = Handshake("group", places, worker, Timeline(no_progress), send)
    left = {rank: messages_of(rank) for rank in range(RANKS)}
    while any(left.values()):
        able = [rank for rank in left if left[rank] and may_go_on(left[rank][0], rank, sent[rank])]
        rank = rng.choice(able)
        greeted.add(rank)
        handshake.take(rank, left[rank].pop(0))
    assert not handshake.missing
    assert handshake.info().num_pages == 10
    assert sent[0] == [messages.Welcome, messages.Allocate]
    assert sent[1] == sent[2] == [messages.Welcome, messages.Rendezvous, messages.Allocate]


def may_go_on(message: messages.Message, rank: int, answers: list[type]) -> bool:
    """Whether a rank that got these answers sends this message."""
    if isinstance(message, messages.Capacity):
        return rank == 0 or messages.Rendezvous in answers
    return not isinstance(message, messages.Ready) or messages.Allocate in answers
