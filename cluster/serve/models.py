"""The models that an ingress serves: each with its own engine deployment, tokenizer and limits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config import EngineConfig
from cluster.errors import EngineError, InvalidRequestError, NotReadyError, UnknownModelError
from cluster.model_files import served_name
from cluster.serve.answers import ModelCard
from cluster.serve.broadcast import ask_all
from cluster.serve.engine_client import EngineClient
from cluster.serve.errors import from_wire
from cluster.serve.logprobs import LogprobWriter
from cluster.serve.metrics import ModelMetrics
from cluster.serve.parsers import choose_tool_parser, has_reasoning
from cluster.serve.service import Service
from cluster.serve.text import TextWorker
from cluster.tokenizer import Tokenizer

logger = logging.getLogger("ray.serve")

RECORDING_TIMEOUT = 30.0


class ServedModel:
    """One model: its engine deployment, and its `Service` once an engine has said what the model is."""

    def __init__(self, engine: DeploymentHandle, config: EngineConfig) -> None:
        self.engine = engine
        self.name = config.served_model_name or served_name(config.model)
        self.failure: Exception | None = None
        self.loaded: Service | None = None
        self._config = config
        self._start_up = asyncio.create_task(self._start())

    @property
    def service(self) -> Service:
        """Raises NotReadyError while the model is loading, EngineError if it cannot be served."""
        if self.failure is not None:
            raise EngineError(f"the server cannot start: {self.failure}")
        if self.loaded is None:
            raise NotReadyError("the model is still loading; try again later")
        return self.loaded

    def check_health(self) -> None:
        """Raises what kept the model from starting, or keeps it from answering."""
        if self.failure is not None:
            raise self.failure
        if self.loaded is not None:
            self.loaded.engine.check_health()

    async def readiness(self) -> tuple[int, dict[str, int]]:
        """Engines whose steps finish, and the sums of their counters.

        No engine is all right where it was scaled to zero: the next request starts one.

        Raises:
            EngineError: none is ready; says why. NotReadyError: this ingress is stopping.
        """
        if self.service.engine.draining:
            raise NotReadyError("the server is stopping")
        statuses = list((await ask_all(self.engine, "status")).values())
        if not statuses and await asyncio.to_thread(self._sleeps):
            return 0, {}
        problems = [status["failure"] or status["stalled"] for status in statuses]
        if all(problems):
            raise EngineError(f"no engine is ready: {'; '.join(problems) or 'none answers'}")
        good = [status["stats"] for status, problem in zip(statuses, problems, strict=True) if problem is None]
        return len(good), sums(good)

    async def record_flight(self) -> list[dict[str, Any]]:
        """Where the flight recordings of its engines are. Raises what the first said if none could save one."""
        answers = list((await ask_all(self.engine, "record_flight", RECORDING_TIMEOUT)).values())
        if not answers:
            raise EngineError("no engine answers")
        saved = [answer for answer in answers if "error" not in answer]
        if not saved:
            raise from_wire(answers[0]["error"])
        return saved

    def _sleeps(self) -> bool:
        """Whether there is no engine because nobody needed one, or one is being started since somebody does."""
        context = serve.get_replica_context()
        engine = serve.status().applications[context.app_name].deployments[self.engine.deployment_name]
        needs_none = engine.status.value == "HEALTHY" and not engine.replica_states
        return needs_none or engine.status_trigger.value == "AUTOSCALING"

    async def _start(self) -> None:
        config = self._config
        try:
            info = await self.engine.info.remote()
            tokenizer = await asyncio.to_thread(Tokenizer, info["model"])
            await asyncio.to_thread(lambda: tokenizer.token_bytes)  # built on first use; not on the first request
            template = tokenizer.chat_template
            context = ray.get_runtime_context()
            self.loaded = Service(
                model=info["served_model_name"],
                max_seq_len=info["max_seq_len"],
                engine=EngineClient(
                    self.engine, tokenizer, context.get_node_id(), ray.util.get_node_ip_address(), config
                ),
                text=TextWorker(tokenizer, info["vocab_size"], info["max_seq_len"]),
                config=config,
                logprobs=LogprobWriter(tokenizer),
                tool_parser=choose_tool_parser(config.tool_parser, template and template.source),
                has_reasoning=has_reasoning(config.reasoning_parser, template and template.source),
            )
        except Exception as error:
            logger.exception("the ingress cannot serve %s", self.name)
            self.failure = error


def sums(counters: Iterable[dict[str, int]]) -> dict[str, int]:
    """Counters of several engines, added up by name."""
    total: dict[str, int] = {}
    for each in counters:
        for name, value in each.items():
            total[name] = total.get(name, 0) + value
    return total


class Models:
    """All models of an ingress, by the name that clients use."""

    def __init__(self, engines: Sequence[DeploymentHandle], configs: Sequence[EngineConfig]) -> None:
        self.all = [ServedModel(engine, config) for engine, config in zip(engines, configs, strict=True)]

    def service(self, name: str | None) -> Service:
        """The service of the model that a request names; one that names none gets the only one.

        Raises:
            UnknownModelError: no such model here. InvalidRequestError: several, and the request names none.
            EngineError: see `ServedModel.service`.
        """
        if len(self.all) == 1:
            service = self.all[0].service
            service.check_model(name)
            return service
        names = [model.name for model in self.all]
        if name is None:
            raise InvalidRequestError(f"model: this server has several, name one of {', '.join(names)}", "model")
        if name not in names:
            raise UnknownModelError(
                f"the model '{name}' is not served here; this server has {', '.join(names)}", "model"
            )
        return self.all[names.index(name)].service

    @property
    def loaded(self) -> list[Service]:
        """The services of the models that are up."""
        return [model.loaded for model in self.all if model.loaded is not None]

    @property
    def cards(self) -> list[ModelCard]:
        """What /v1/models tells of the models that are up.

        Raises:
            NotReadyError, EngineError: none is; see `ServedModel.service`.
        """
        return [service.card for service in self.loaded or [self.all[0].service]]

    def client_metrics(self) -> dict[str, Any]:
        """What the clients of this ingress saw of the models that are up, by name; see `IngressMetrics.snapshot`."""
        return {model.name: model.loaded.engine.metrics.snapshot() for model in self.all if model.loaded is not None}

    def metrics(self, ingresses: dict[str, dict[str, Any]], engines: Sequence[dict[str, Any]]) -> list[ModelMetrics]:
        """Of each model, also of one that is not up here or at another ingress.

        Args:
            ingresses: `client_metrics` by ingress. engines: for each model, the metrics of its engines by replica.
        """
        return [
            ModelMetrics(
                model.name,
                {name: seen[model.name] for name, seen in ingresses.items() if model.name in seen},
                of_engines,
            )
            for model, of_engines in zip(self.all, engines, strict=True)
        ]

    async def drain(self, grace: float) -> int:
        """See `EngineClient.drain`, for all models at once."""
        return sum(await asyncio.gather(*(service.engine.drain(grace) for service in self.loaded)))

    def health(self) -> dict[str, Any]:
        """What /health tells."""
        engines = [service.engine for service in self.loaded]
        outstanding: dict[str, int] = {}
        for engine in engines:
            outstanding |= engine.fleet.outstanding()
        return {
            "open_streams": sum(engine.open_streams for engine in engines),
            "dropped_messages": sum(engine.dropped_messages for engine in engines),
            "outstanding_tokens": outstanding,
            "unknown_replicas": sum(engine.fleet.unknown for engine in engines),
        }

    def close(self) -> None:
        for service in self.loaded:
            service.engine.close()
            service.text.close()
