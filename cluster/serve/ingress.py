"""The HTTP surface: routes, and the start-up and end of an ingress replica.

Ray pickles the routes by value, and FastAPI reads their annotations again in the replica; so in this file annotations
are the types themselves and not strings (no `from __future__ import annotations`).
"""

import asyncio
import time
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from cluster.config import EngineConfig
from cluster.errors import RaydixError
from cluster.serve.answers import ChatCompletion, Completion, Detokenized, ErrorAnswer, ModelCard, ModelList, Tokenized
from cluster.serve.broadcast import ask_all
from cluster.serve.chat import chat_completion
from cluster.serve.completions import completion
from cluster.serve.dashboard import Collector, ingress_facts, page_file
from cluster.serve.errors import problem_of
from cluster.serve.gate import Gate, Rules, respond
from cluster.serve.metrics import render
from cluster.serve.models import Models, sums
from cluster.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from cluster.serve.retirement import retired
from cluster.serve.tokenization import detokenize, tokenize

VERSION = version("raydix")

ERRORS = {
    "4XX": {"model": ErrorAnswer, "description": "the request is wrong, or there is no room for it now"},
    "5XX": {"model": ErrorAnswer, "description": "the server cannot answer it"},
}
STREAMED = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
app = FastAPI(title="Raydix", version=VERSION, docs_url=None, redoc_url=None, responses=ERRORS)
app.add_middleware(Gate)


@app.exception_handler(RaydixError)
@app.exception_handler(RequestValidationError)
@app.exception_handler(HTTPException)
@app.exception_handler(Exception)
async def answer_error(request: Request, error: Exception) -> Response:
    """Every error in OpenAI's form."""
    return respond(problem_of(error))


@serve.deployment(
    name="ingress",
    num_replicas=1,
    ray_actor_options={"num_cpus": 0.1},
    max_ongoing_requests=10_000,
    health_check_period_s=2,
    graceful_shutdown_wait_loop_s=0.5,
)
@serve.ingress(app)
class Ingress:
    """Speaks HTTP and text; the engine speaks tokens. /health answers at once, the rest when the engine is up."""

    async def __init__(self, engines: list[DeploymentHandle], configs: list[EngineConfig]) -> None:
        """One engine deployment for each config, in order. What is not a model's own (keys, limits of bodies, origins,
        draining) is taken from the first."""
        context = serve.get_replica_context()
        self._replica = context.replica_id.unique_id
        self._siblings = serve.get_deployment_handle(context.deployment, context.app_name)
        self._config = configs[0]
        self._models = Models(engines, configs)
        self._collector = Collector(engines)
        self._start_up = asyncio.create_task(self._open())
        self._end = asyncio.create_task(self._await_end())

    async def _open(self) -> None:
        # Serve makes `self.app` after this object; nothing is awaited in between, so no request comes before this.
        self.app.state.rules = Rules(self._config)

    async def drain(self, grace: float) -> int:
        """Take no new requests, and return when those that run have ended. After `grace` seconds the rest ends with an
        error; returns how many."""
        return await self._models.drain(grace)

    async def _await_end(self) -> None:
        """Serve stops a replica without a word to it, and kills it when its time is up: end what runs before that."""
        await retired()
        await self.drain(self._config.drain_timeout)

    def check_health(self) -> None:
        """Serve calls this. Raises what keeps a model from answering, so that Serve replaces the ingress."""
        for model in self._models.all:
            model.check_health()

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
    async def chat_completions(self, body: ChatCompletionRequest) -> Any:
        return await chat_completion(self._models.service(body.model), body, time.monotonic())

    @app.post("/v1/completions", response_model=Completion, responses=STREAMED)
    async def completions(self, body: CompletionRequest) -> Any:
        return await completion(self._models.service(body.model), body, time.monotonic())

    @app.post("/tokenize", response_model=Tokenized)
    async def tokenize(self, body: TokenizeRequest) -> Any:
        return await tokenize(self._models.service(body.model), body)

    @app.post("/detokenize")
    async def detokenize(self, body: DetokenizeRequest) -> Detokenized:
        return await detokenize(self._models.service(body.model), body)

    @app.get("/v1/models")
    async def models(self) -> ModelList:
        return ModelList(data=self._models.cards)

    @app.get("/v1/models/{model:path}")
    async def model(self, model: str) -> ModelCard:
        return self._models.service(model).card

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health(self) -> dict[str, Any]:
        """This process answers. Whether engines do is /ready's question."""
        loading = len(self._models.loaded) < len(self._models.all)
        return {"status": "starting" if loading else "ok"} | self._models.health()

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready(self) -> dict[str, Any]:
        """200 while steps of some engine of every model finish (an idle one probes its ranks), else 503 with why not.

        `stats` are sums over the engines.
        """
        found = await asyncio.gather(*(model.readiness() for model in self._models.all))
        return {
            "status": "ready",
            "replicas": sum(count for count, _ in found),
            "stats": sums(each for _, each in found),
        }

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(self) -> Response:
        """Of all replicas of the ingress and the engines, whichever of them is asked."""
        ingresses, *engines = await asyncio.gather(
            ask_all(self._siblings, "client_metrics"), *(ask_all(model.engine, "metrics") for model in self._models.all)
        )
        ingresses |= {self._replica: await self.client_metrics()}
        return Response(render(self._models.metrics(ingresses, engines)), media_type=CONTENT_TYPE_LATEST)

    @app.post("/flight_record")
    async def flight_record(self) -> dict[str, Any]:
        """Save every engine's last steps, each on its node. Answers where: [{"replica", "node_ip", "file"}, ...]."""
        found = await asyncio.gather(*(model.record_flight() for model in self._models.all))
        return {"recordings": [recording for recordings in found for recording in recordings]}

    async def client_metrics(self) -> dict[str, Any]:
        """For the other ingresses: see `Models.client_metrics`."""
        return self._models.client_metrics() | {"replica": self._replica}

    @app.get("/dashboard/state")
    async def dashboard_state(self) -> dict[str, Any]:
        service = self._models.all[0].service  # the one that its chat speaks to
        facts = {"model": service.model, "max_seq_len": service.max_seq_len, "version": VERSION}
        return facts | await self._collector.state()

    @app.get("/dashboard", include_in_schema=False)
    @app.get("/dashboard/{name}", include_in_schema=False)
    async def dashboard(self, name: str = "index.html") -> Response:
        return page_file(name)

    async def facts(self) -> list[dict[str, Any]]:
        """What clients of this ingress saw of each model, for the dashboard; called by another ingress or this one."""
        return [ingress_facts(service) for service in self._models.loaded]

    @app.get("/version")
    async def version(self) -> dict[str, str]:
        return {"version": VERSION}

    def __del__(self) -> None:
        """Serve calls this when the replica stops."""
        self._models.close()
