"""`LLM`: offline generation with an engine of its own."""

from __future__ import annotations

import queue
import secrets
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np

from cluster.config import EngineConfig
from cluster.detokenizer import IncrementalDetokenizer
from cluster.engine import Engine
from cluster.engine_info import EngineInfo
from cluster.errors import EngineClosedError, EngineError, InvalidRequestError
from cluster.llm_stream import RequestOutput, Stream
from cluster.progress import Progress, no_progress
from cluster.progress_bar import ProgressBar, progress_bar
from cluster.tokenizer import Tokenizer
from scheduler.outputs import FinishReason, StepOutputs
from scheduler.request import InvalidRequest, Request
from scheduler.sampling_params import SamplingParams
from scheduler.step import LogprobBlock

Prompt = str | Sequence[int]

_BURST = 256  # requests submitted at a time
_WAIT = 1.0  # between looks at the engine's health, should its thread have ended without a word


class LLM:
    """Loads a model onto `tp_size` worker actors and generates for lists of prompts.

    A context manager; `shutdown` ends the workers, and so does the end of the process. `generate` may be called from
    several threads, which take turns.

    Args:
        model: local directory or hub id; None for the default model.
        progress: called with each start-up phase and its share done.
        config: further settings of `EngineConfig`.

    Raises:
        ConfigError, ModelLoadError, StartupError: see `Engine.start`.
    """

    def __init__(
        self,
        model: str | None = None,
        tp_size: int = 1,
        device: str = "auto",
        dtype: str = "auto",
        page_size: int = 16,
        *,
        progress: Progress = no_progress,
        **config: Any,
    ) -> None:
        settings = {"model": model, "tp_size": tp_size, "device": device, "dtype": dtype, "page_size": page_size}
        requested = EngineConfig.parse(settings | config)
        self._arrivals: queue.SimpleQueue[StepOutputs | EngineError] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._next_id = 0
        engine = Engine(requested, self._arrivals.put, self._arrivals.put)
        engine.start(progress)
        self._engine = engine
        self._at_exit = weakref.finalize(self, engine.shutdown)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises InvalidRequestError for a checkpoint that has none."""
        if self._engine.tokenizer is None:
            raise InvalidRequestError("this checkpoint has no tokenizer: prompts must be lists of token ids", "prompts")
        return self._engine.tokenizer

    @property
    def info(self) -> EngineInfo:
        """Effective settings, vocabulary, ranks, start-up times."""
        return self._engine.info

    @property
    def config(self) -> EngineConfig:
        """The effective settings."""
        return self._engine.info.config

    def stats(self) -> dict[str, Any]:
        """Counters, see `Engine.stats`."""
        return self._engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Generate for every prompt (a text or a list of token ids); outputs are in the order of the prompts.

        One `SamplingParams` serves all prompts, a list must have one for each. Without `max_tokens` a request may fill
        `max_seq_len`; without `seed` each gets a random one. `progress` shows a bar if stderr is a terminal.

        Raises:
            InvalidRequestError: a prompt or its parameters are wrong; names its index. Nothing was run then.
            EngineDeadError, EngineClosedError: the engine cannot go on.
        """
        with self._turn:
            streams = self._make_streams(_as_list(prompts), sampling_params)
            with progress_bar(len(streams), shown=progress) as bar:
                self._run(streams, bar)
        return [stream.output() for stream in streams]

    def shutdown(self) -> None:
        """End the workers. Safe to call twice."""
        self._at_exit()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _make_streams(
        self, prompts: list[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Stream]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if not isinstance(sampling_params, Sequence) or len(sampling_params) != len(prompts):
            given = len(sampling_params) if isinstance(sampling_params, Sequence) else type(sampling_params).__name__
            raise InvalidRequestError(
                f"{len(prompts)} prompts, but {given} sampling_params: give one for all or one for each",
                "sampling_params",
            )
        streams = []
        for index, (prompt, sampling) in enumerate(zip(prompts, sampling_params, strict=True)):
            try:
                streams.append(self._make_stream(prompt, sampling))
            except (InvalidRequestError, InvalidRequest) as error:
                where = f"prompt {index}: " if len(prompts) > 1 else ""
                raise InvalidRequestError(f"{where}{error}", getattr(error, "param", None)) from error
        return streams

    def _make_stream(self, prompt: Prompt, sampling: SamplingParams) -> Stream:
        if not isinstance(sampling, SamplingParams):
            raise InvalidRequestError(f"not SamplingParams, but {type(sampling).__name__}", "sampling_params")
        ids = self._encode(prompt) if isinstance(prompt, str) else _as_ids(prompt)
        fixed = fix_sampling(sampling, len(ids), self.info.max_seq_len)
        request = Request(self._next_id, ids, fixed)
        self._engine.validate(request)
        self._engine.grammars.prepare(request)
        detokenizer = None
        if self._engine.tokenizer is not None:
            ends = () if fixed.ignore_eos else self.info.eos_token_ids
            detokenizer = IncrementalDetokenizer(
                self._engine.tokenizer,
                fixed.stop,
                stop_token_ids={*ends, *fixed.stop_token_ids},
                continues_text=True,
                min_tokens=fixed.min_tokens,
            )
        elif fixed.stop:
            raise InvalidRequestError("stop strings need a tokenizer, which this checkpoint lacks", "stop")
        self._next_id += 1
        return Stream(request, prompt if isinstance(prompt, list) else request.prompt_ids.tolist(), detokenizer)

    def _encode(self, text: str) -> np.ndarray:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"not valid Unicode: a lone surrogate at character {error.start}") from error
        return np.asarray(self.tokenizer.encode(text))

    def _run(self, streams: list[Stream], bar: ProgressBar) -> None:
        waiting = deque(streams)
        running: dict[int, Stream] = {}
        try:
            while waiting or running:
                self._submit(waiting, running)
                arrival = self._next_arrival()
                if isinstance(arrival, EngineError):
                    raise arrival
                self._take(arrival, running, bar)
        except BaseException:  # Ctrl-C included: leave nothing running behind the caller's back
            for request_id in running:
                self._engine.abort(request_id)
            raise

    def _submit(self, waiting: deque[Stream], running: dict[int, Stream]) -> None:
        """Submit what the queue takes; the rest follows as requests finish."""
        while waiting:
            burst = list(islice(waiting, _BURST))
            taken = self._engine.submit_many([stream.request for stream in burst])
            for stream in burst[:taken]:
                running[stream.request.request_id] = waiting.popleft()
            if taken < len(burst):
                return

    def _next_arrival(self) -> StepOutputs | EngineError:
        while True:
            try:
                return self._arrivals.get(timeout=_WAIT)
            except queue.Empty:
                if not self._at_exit.alive:
                    raise EngineClosedError("the engine was shut down") from None
                if self._engine.failure is not None and self._arrivals.empty():
                    raise self._engine.failure from None

    def _take(self, outputs: StepOutputs, running: dict[int, Stream], bar: ProgressBar) -> None:
        if outputs.logprobs is not None:
            for entry, words in zip(outputs.logprobs.index.tolist(), outputs.logprobs.block.words, strict=True):
                if (stream := running.get(int(outputs.request_ids[entry]))) is not None:
                    stream.add_logprobs(LogprobBlock(words[None]))
        for request_id, block in outputs.prompt_logprobs.items():
            if request_id in running:
                running[request_id].prompt_logprobs = block
        columns = (outputs.request_ids, outputs.tokens, outputs.finish, outputs.cached_tokens)
        for request_id, token, finish, cached in zip(*(column.tolist() for column in columns), strict=True):
            stream = running.get(request_id)
            if stream is None:  # aborted: by its stop string, or by Ctrl-C in an earlier call
                continue
            stream.cached_tokens = cached
            if token >= 0:
                stream.token_ids.append(token)
                if stream.stops_at_text(token):
                    self._engine.abort(request_id)
                    finish = FinishReason.STOP
            if finish != FinishReason.NONE:
                stream.finish = FinishReason(finish)
                stream.error = outputs.errors.get(request_id)
                bar.finished(len(stream.token_ids))
                del running[request_id]


def fix_sampling(sampling: SamplingParams, prompt_len: int, max_seq_len: int) -> SamplingParams:
    """`sampling` with `max_tokens` (None: up to `max_seq_len`) and `seed` (None: a random one) filled in."""
    missing: dict[str, int] = {}
    if sampling.max_tokens is None:
        missing["max_tokens"] = max(max_seq_len - prompt_len, 0)
    if sampling.seed is None:
        missing["seed"] = secrets.randbits(63)
    return sampling.model_copy(update=missing) if missing else sampling


def _as_ids(prompt: Sequence[int]) -> np.ndarray:
    if isinstance(prompt, list):
        with suppress(TypeError, OverflowError):  # several times as fast as numpy on a list
            return np.frombuffer(array("i", prompt), dtype=np.int32)
    try:
        ids = np.asarray(prompt)
    except ValueError as error:  # a list of lists of different lengths
        raise InvalidRequestError("not a flat list of token ids", "prompts") from error
    if not ids.ndim:
        raise InvalidRequestError(f"neither a text nor token ids, but {type(prompt).__name__}", "prompts")
    return ids


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt, text or ids, is a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (Sequence, np.ndarray)) or isinstance(prompts, bytes):
        raise InvalidRequestError(f"prompts must be a text or a list, not {type(prompts).__name__}", "prompts")
    return [prompts] if len(prompts) and isinstance(prompts[0], (int, np.integer)) else list(prompts)
