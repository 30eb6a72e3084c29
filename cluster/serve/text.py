"""Text to tokens, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cluster.errors import InvalidRequestError
from cluster.tokenizer import Tokenizer

THREADS = 2  # one long prompt must not hold up a short one

T = TypeVar("T")


class TextWorker:
    """Encodes prompts in a small thread pool, so that a long prompt never stops other streams."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="raydix-encode")

    async def encode(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a completion prompt; ids pass through after a check.

        Raises:
            InvalidRequestError: the prompt is empty or holds an id outside the vocabulary.
        """
        if isinstance(prompt, str):
            ids = await self._run(lambda: self.tokenizer.encode(prompt)) if prompt else []
        else:
            ids = prompt
            bad = next((token for token in ids if not 0 <= token < self._vocab_size), None)
            if bad is not None:
                raise InvalidRequestError(f"prompt: token id {bad} is outside 0..{self._vocab_size - 1}", "prompt")
        if not ids:
            raise InvalidRequestError("prompt: the prompt is empty; give at least one token of text", "prompt")
        return ids

    async def encode_chat(self, messages: list[dict[str, str]], options: dict[str, Any]) -> list[int]:
        """Token ids of a conversation through the model's chat template, which writes its own BOS if it wants one.

        Raises:
            InvalidRequestError: the template refuses these messages, or there is no template.
        """
        return await self._run(lambda: self.tokenizer.apply_chat_template(messages, **options))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
