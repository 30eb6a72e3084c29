"""`--device fake`: ranks that answer at once with deterministic, readable text, to measure everything around a model.

Plans go through the real scheduler, transport, driver and server to a `FakeWorker`, which checks every slot of them and
draws the next token from a hash of the request's tokens and sampling parameters. No weights are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from cluster.errors import ModelLoadError
from cluster.tokenizer import Tokenizer
from scheduler.config import SchedulerConfig
from scheduler.fake_model import FakeModel
from scheduler.fake_worker import FakeWorker
from scheduler.step import StepPlan, StepResult
from worker.checkpoint_config import read_checkpoint_config
from worker.config import WorkerConfig
from worker.errors import ModelError

if TYPE_CHECKING:
    from cluster.rank_startup import RankSpec, Startup

MAX_POOL_TOKENS = 1 << 20  # of a pool whose size nobody chose; 24 bytes each


class ReadableModel(FakeModel):
    """Draws uniformly from `tokens`, ids in ascending order; never ends a sequence by itself."""

    def __init__(self, vocab_size: int, tokens: np.ndarray) -> None:
        super().__init__(vocab_size)
        self._tokens = tokens

    def next_tokens(self, contents: np.ndarray, keys: np.ndarray) -> np.ndarray:
        draws = super().next_tokens(contents, keys)
        return self._tokens[draws % len(self._tokens)]


def readable_tokens(path: Path, vocab_size: int) -> np.ndarray:
    """int32: ids whose text is whole and printable by itself. All ids of a checkpoint without tokenizer."""
    try:
        pieces = Tokenizer(path).token_bytes
    except ModelLoadError:
        return np.arange(vocab_size, dtype=np.int32)
    found = [token for token in range(vocab_size) if token not in pieces.special and _is_printable(pieces[token])]
    if not found:
        raise ModelError(f"the tokenizer in {path} has no token that is printable by itself")
    return np.array(found, dtype=np.int32)


def _is_printable(piece: bytes) -> bool:
    try:
        return bool(piece) and piece.decode().isprintable()
    except UnicodeDecodeError:
        return False


class TimedStep:
    """A step that is done at a `time.monotonic()`."""

    def __init__(self, result: StepResult, due: float) -> None:
        self._result = result
        self._due = due

    def result(self) -> StepResult:
        left = self._due - time.monotonic()
        if left > 0:
            time.sleep(left)
        return self._result


class FakeRunner:
    """The `rank_startup.Runner` of one rank. Vocabulary, tokenizer and length limit are those of the checkpoint.

    `tokens_per_s`: input tokens that it takes a second; None: no time passes.
    """

    def __init__(self, worker: WorkerConfig, tokens_per_s: float | None = None) -> None:
        self._config = worker
        self._token_seconds = 0.0 if tokens_per_s is None else 1.0 / tokens_per_s
        self._busy_until = 0.0

    def load(self) -> None:
        """Read config.json and the tokenizer. Raises ModelError."""
        path = Path(self._config.model_path)
        checkpoint = read_checkpoint_config(path)
        self._tokens = readable_tokens(path, checkpoint.vocab_size)
        self.model_info = SimpleNamespace(
            vocab_size=checkpoint.vocab_size,
            max_seq_len=self._config.max_seq_len or checkpoint.max_position_embeddings,
            eos_token_ids=(),
            dtype="float32",
        )

    def max_pages(self) -> int:
        """Enough for every row at full length, within MAX_POOL_TOKENS."""
        tokens = min(self._config.max_running_requests * self.model_info.max_seq_len, MAX_POOL_TOKENS)
        return -(-tokens // self._config.page_size)

    def allocate(self, num_pages: int) -> None:
        config, model = self._config, self.model_info
        plans = SchedulerConfig(
            num_pages=num_pages,
            page_size=config.page_size,
            max_running_requests=config.max_running_requests,
            max_seq_len=model.max_seq_len,
            max_step_tokens=config.max_step_tokens,
        )
        self._worker = FakeWorker(plans, ReadableModel(model.vocab_size, self._tokens), full_check=False)

    def warm_up(self) -> list[int]:
        return []

    def launch(self, plan: StepPlan) -> TimedStep:
        """Raises FakeWorkerError for a plan that a model would turn into wrong tokens."""
        result = self._worker.execute(plan)
        self._busy_until = max(self._busy_until, time.monotonic()) + plan.num_tokens * self._token_seconds
        return TimedStep(result, self._busy_until)


def make_fake_runner(
    spec: RankSpec, startup: Startup, tokens_per_s: float | None = None
) -> tuple[FakeRunner, Callable[[], None]]:
    """A `rank_startup.RunnerFactory`. The ranks never meet, so there is nothing to wait for."""
    return FakeRunner(spec.worker, tokens_per_s), lambda: None
