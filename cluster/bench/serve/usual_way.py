"""How tokens usually leave Ray: an actor's streaming generator yields each token to the ingress, which sends it on.

A minimal application that answers POST /v1/completions with `stream`, to compare our serving path with. It makes no
tokens, it only repeats words.

Ray pickles the routes by value, and FastAPI reads their annotations again in the replica; so in this file annotations
are the types themselves and not strings (no `from __future__ import annotations`), and what they call comes first.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from cluster.bench.serve.sessions import WORDS

CALLS = 10_000

app = FastAPI()


async def events(tokens: AsyncIterator[str], count: int) -> AsyncIterator[str]:
    """A text completion as server-sent events, with usage."""
    head = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "usual"}
    async for text in tokens:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
        yield f"data: {json.dumps(head | {'choices': [choice], 'usage': None})}\n\n"
    last = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
    yield f"data: {json.dumps(head | {'choices': [last], 'usage': None})}\n\n"
    usage = {"prompt_tokens": 0, "completion_tokens": count, "total_tokens": count}
    yield f"data: {json.dumps(head | {'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


@serve.deployment(name="usual-engine", ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=CALLS)
class UsualEngine:
    """Yields one word a token."""

    async def generate(self, max_tokens: int) -> AsyncIterator[str]:
        for number in range(max_tokens):
            yield " " + WORDS[number % len(WORDS)]


@serve.deployment(name="usual-ingress", ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=CALLS)
@serve.ingress(app)
class UsualIngress:
    """Sends each token as an event of its own."""

    def __init__(self, engine: DeploymentHandle) -> None:
        self._engine = engine.options(stream=True)

    @app.post("/v1/completions")
    async def completions(self, body: dict[str, Any]) -> StreamingResponse:
        tokens = self._engine.generate.remote(body["max_tokens"])
        return StreamingResponse(events(tokens, body["max_tokens"]), media_type="text/event-stream")


def build_app() -> Application:
    """For `serve.run`."""
    return UsualIngress.bind(UsualEngine.bind())
