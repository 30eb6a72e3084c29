"""The HTTP surface: routes, and the start-up and end of an ingress replica.

Ray pickles the routes by value, and FastAPI reads their annotations again in the replica; so in this file annotations
are the types themselves and not strings (no `from __future__ import annotations`).
"""

import asyncio
import logging
import time
from importlib.metadata import version
from typing import Any

import ray
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from cluster.config import EngineConfig
from cluster.errors import EngineError, NotReadyError, RaydixError
from cluster.serve.answers import ChatCompletion, Completion, Detokenized, ModelCard, ModelList, Tokenized
from cluster.serve.chat import chat_completion
from cluster.serve.completions import completion
from cluster.serve.dashboard import Collector, ingress_facts, page_file
from cluster.serve.engine_client import EngineClient
from cluster.serve.errors import problem_of
from cluster.serve.gate import Gate, Rules, respond
from cluster.serve.logprobs import LogprobWriter
from cluster.serve.metrics import render
from cluster.serve.parsers import choose_tool_parser, has_reasoning
from cluster.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from cluster.serve.retirement import retired
from cluster.serve.service import Service
from cluster.serve.text import TextWorker
from cluster.serve.tokenization import detokenize, tokenize
from cluster.tokenizer import Tokenizer

logger = logging.getLogger("ray.serve")
VERSION = version("raydix")

app = FastAPI(title="Raydix", version=VERSION, docs_url=None, redoc_url=None)
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

    async def __init__(self, engine: DeploymentHandle, config: EngineConfig) -> None:
        self._engine = engine
        self._config = config
        self._service: Service | None = None
        self._collector: Collector | None = None
        self._failure: Exception | None = None
        self._start_up = asyncio.create_task(self._start())
        self._end = asyncio.create_task(self._await_end())

    async def _start(self) -> None:
        # Serve makes `self.app` after this object; nothing is awaited in between, so no request comes before this.
        self.app.state.rules = Rules(self._config)
        try:
            info = await self._engine.info.remote()
            tokenizer = await asyncio.to_thread(Tokenizer, info["model"])
            await asyncio.to_thread(lambda: tokenizer.token_bytes)  # built on first use; not on the first request
            template = tokenizer.chat_template
            self._collector = Collector(self._engine)
            context = ray.get_runtime_context()
            self._service = Service(
                model=info["served_model_name"],
                max_seq_len=info["max_seq_len"],
                engine=EngineClient(
                    self._engine, tokenizer, context.get_node_id(), ray.util.get_node_ip_address(), self._config
                ),
                text=TextWorker(tokenizer, info["vocab_size"], info["max_seq_len"]),
                config=self._config,
                logprobs=LogprobWriter(tokenizer),
                tool_parser=choose_tool_parser(self._config.tool_parser, template and template.source),
                has_reasoning=has_reasoning(self._config.reasoning_parser, template and template.source),
            )
        except Exception as error:
            logger.exception("the ingress cannot start")
            self._failure = error

    async def drain(self, grace: float) -> int:
        """Take no new requests, and return when those that run have ended. After `grace` seconds the rest ends with an
        error; returns how many."""
        return 0 if self._service is None else await self._service.engine.drain(grace)

    async def _await_end(self) -> None:
        """Serve stops a replica without a word to it, and kills it when its time is up: end what runs before that."""
        await retired()
        await self.drain(self._config.drain_timeout)

    def check_health(self) -> None:
        """Serve calls this. Raises what kept the ingress from starting, so that Serve replaces it."""
        if self._failure is not None:
            raise self._failure

    def _ready_service(self) -> Service:
        if self._failure is not None:
            raise EngineError(f"the server cannot start: {self._failure}")
        if self._service is None:
            raise NotReadyError("the model is still loading; try again later")
        return self._service

    @app.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(self, body: ChatCompletionRequest) -> Any:
        return await chat_completion(self._ready_service(), body, time.monotonic())

    @app.post("/v1/completions", response_model=Completion)
    async def completions(self, body: CompletionRequest) -> Any:
        return await completion(self._ready_service(), body, time.monotonic())

    @app.post("/tokenize")
    async def tokenize(self, body: TokenizeRequest) -> Tokenized:
        return await tokenize(self._ready_service(), body)

    @app.post("/detokenize")
    async def detokenize(self, body: DetokenizeRequest) -> Detokenized:
        return await detokenize(self._ready_service(), body)

    @app.get("/v1/models")
    async def models(self) -> ModelList:
        return ModelList(data=[self._ready_service().card])

    @app.get("/v1/models/{model:path}")
    async def model(self, model: str) -> ModelCard:
        service = self._ready_service()
        service.check_model(model)
        return service.card

    @app.get("/health")
    async def health(self) -> dict[str, Any]:
        """This process answers. Whether the engine does is /ready's question."""
        if self._service is None:
            return {"status": "starting"}
        engine = self._service.engine
        return {"status": "ok", "open_streams": engine.open_streams, "dropped_messages": engine.dropped_messages}

    @app.get("/ready")
    async def ready(self) -> dict[str, Any]:
        """200 while steps finish (an idle engine probes its ranks), else 503 with the reason."""
        engine = self._ready_service().engine
        if engine.draining:
            raise NotReadyError("the server is stopping")
        status = await engine.status()
        problem = status["failure"] or status["stalled"]
        if problem is not None:
            raise EngineError(f"the engine is not ready: {problem}")
        return {"status": "ready", "stats": status["stats"]}

    @app.get("/metrics")
    async def metrics(self) -> Response:
        service = self._ready_service()
        text = render(service.model, service.engine.metrics, await service.engine.engine_metrics())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.post("/flight_record")
    async def flight_record(self) -> dict[str, Any]:
        """Save the engine's last steps, on its node."""
        return await self._ready_service().engine.record_flight()

    @app.get("/dashboard/state")
    async def dashboard_state(self) -> dict[str, Any]:
        service = self._ready_service()
        facts = {"model": service.model, "max_seq_len": service.max_seq_len, "version": VERSION}
        return facts | await self._collector.state()

    @app.get("/dashboard")
    @app.get("/dashboard/{name}")
    async def dashboard(self, name: str = "index.html") -> Response:
        return page_file(name)

    async def facts(self) -> dict[str, Any]:
        """What clients of this ingress saw, for the dashboard; called by another ingress or this one."""
        return ingress_facts(self._service.engine) if self._service is not None else {}

    @app.get("/version")
    async def version(self) -> dict[str, str]:
        return {"version": VERSION}

    def __del__(self) -> None:
        """Serve calls this when the replica stops."""
        if self._service is not None:
            self._service.engine.close()
            self._service.text.close()
