"""What one request may ask for: tokens (`max_output_tokens`, and so what a client that reads nothing can cost), and
choices."""

from __future__ import annotations

import pytest

from cluster.config import EngineConfig
from cluster.errors import InvalidRequestError
from cluster.serve.protocol import ChatCompletionRequest, CompletionRequest
from cluster.serve.service import Service

PROMPTS = [[1, 2, 3], [4]]


def lengths(request, most, default=None):
    service = Service("m", 64, None, None, EngineConfig(max_output_tokens=most), None)
    pairs = service.plan(request, PROMPTS[: len(getattr(request, "prompts", [0]))], "prompt", default, None)
    return [sampling.max_tokens for _, sampling in pairs]


def completion(**fields):
    return CompletionRequest(prompt=PROMPTS, **fields)


def test_a_length_that_nobody_chose_is_shortened():
    assert lengths(completion(n=2), 40) == [10] * 4
    assert lengths(completion(n=2), 40, 16) == [10] * 4
    assert lengths(completion(), 40, 16) == [16] * 2
    assert lengths(completion(), None) == [61, 63]
    assert lengths(completion(), 1000) == [61, 63]


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (completion(max_tokens=21), "max_tokens"),
        (completion(max_tokens=11, n=2), "max_tokens"),
        (completion(n=21), "n"),
        (ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], max_completion_tokens=41), None),
    ],
)
def test_a_length_beyond_it_is_refused_by_name(request_, param):
    with pytest.raises(InvalidRequestError, match="max_output_tokens") as caught:
        lengths(request_, 40)
    assert caught.value.param == (param or "max_completion_tokens")


def test_as_much_as_allowed_is_given():
    assert lengths(completion(max_tokens=20), 40) == [20, 20]
    assert lengths(completion(max_tokens=0), 40) == [0, 0]


def planned(request):
    """How many choices are asked of an engine that holds three requests."""
    service = Service("m", 64, None, None, EngineConfig(max_running_requests=2, max_queued_requests=1), None)
    return len(service.plan(request, getattr(request, "prompts", [[1]]), "prompt", None, None))


def chat(n):
    return ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], n=n)


@pytest.mark.parametrize(
    ("request_", "param"),
    [(CompletionRequest(prompt=[[1]] * 4), "prompt"), (completion(n=2), "n"), (chat(4), "n")],
)
def test_more_choices_than_an_engine_can_ever_hold_are_refused_by_name(request_, param):
    with pytest.raises(InvalidRequestError, match=rf"^{param}: 4 choices .* holds 3 .*--max-queued-requests") as caught:
        planned(request_)
    assert caught.value.param == param


def test_as_many_choices_as_an_engine_holds_are_asked_of_it():
    assert planned(CompletionRequest(prompt=[[1]] * 3)) == planned(chat(3)) == 3
