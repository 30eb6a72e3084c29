"""Text to tokens and back; all that takes long off the event loop."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster.errors import InvalidRequestError
from cluster.serve.errors import ContextLengthError
from cluster.serve.messages import ChatMessage
from cluster.serve.parsers import reasoning
from cluster.serve.sse import to_json
from cluster.tokenizer import Tokenizer

LONG = 1 << 16  # characters: texts from here on wait for each other, so that they never hold up a short one
SHORT_THREADS = 2
AT_ONCE = 512  # characters: less takes less time to tokenize (0.1 ms) than to hand to a thread and back

T = TypeVar("T")


@dataclass(frozen=True)
class ChatRendering:
    """How the chat template is called.

    continue_final   leave the last message open, so that the answer continues it
    suffix           what the answer is made to begin with
    variables        template variables
    """

    add_generation_prompt: bool = True
    continue_final: bool = False
    suffix: str = ""
    variables: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Characters of the variables, the tools among them."""
        return len(to_json(self.variables)) if self.variables else 0


class TextWorker:
    """Encodes prompts in threads, so that a long prompt never stops other streams (the tokenizer gives up the GIL).
    Texts under `AT_ONCE` characters are encoded on the spot. What is longer than any prompt, which only /tokenize and
    /detokenize take, holds up no prompt either."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_seq_len: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_seq_len = math.inf if max_seq_len is None else max_seq_len
        self._most_characters = math.inf if max_seq_len is None else max_seq_len * longest_token(tokenizer)
        self._short = ThreadPoolExecutor(SHORT_THREADS, thread_name_prefix="raydix-encode")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="raydix-encode-long")
        self._beyond = ThreadPoolExecutor(1, thread_name_prefix="raydix-encode-beyond")

    async def encode(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a completion prompt; ids pass through after a check.

        Raises:
            InvalidRequestError: the prompt is empty, far too long or holds an id outside the vocabulary.
        """
        if isinstance(prompt, str):
            self._check_length(prompt, "prompt")
            ids = await self.encode_text(prompt)
        else:
            ids = prompt
            if len(ids) > self._max_seq_len:
                raise ContextLengthError(
                    f"the prompt has {len(ids)} tokens, but the model's context is {self._max_seq_len}; shorten it",
                    "prompt",
                )
            self.check_ids(ids, "prompt")
        if not ids:
            raise InvalidRequestError("prompt: the prompt is empty; give at least one token of text", "prompt")
        return ids

    async def encode_text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, which may be empty."""
        if not text:
            return []
        return await self._run(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))

    async def encode_chat(
        self, messages: Sequence[ChatMessage], rendering: ChatRendering, add_special_tokens: bool = False
    ) -> tuple[list[int], str]:
        """Token ids and text of a conversation through the model's chat template, which writes its own BOS if it
        wants one.

        Raises:
            InvalidRequestError: the template refuses these messages, or there is no template, or they are far too
                long.
        """

        def work() -> tuple[list[int], str]:
            text = render_chat(self.tokenizer, messages, rendering)
            self._check_length(text, "messages")
            return self.tokenizer.encode(text, add_special_tokens), text

        return await self._run(sum(message.size for message in messages) + rendering.size, work)

    async def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The text of a whole sequence."""
        return await self._run(len(ids), lambda: self.tokenizer.decode(ids, skip_special_tokens))

    async def token_strings(self, ids: list[int]) -> list[str]:
        """Each token as it stands in the vocabulary; empty for an id that the tokenizer does not know."""
        name = self.tokenizer.backend.id_to_token
        return await self._run(len(ids), lambda: [name(token) or "" for token in ids])

    def check_ids(self, ids: list[int], param: str) -> None:
        """Raises InvalidRequestError for an id outside the model's vocabulary."""
        if not ids:
            return
        least, most = min(ids), max(ids)
        if least < 0 or most >= self._vocab_size:
            bad = least if least < 0 else most
            raise InvalidRequestError(f"{param}: token id {bad} is outside 0..{self._vocab_size - 1}", param)

    def _check_length(self, text: str, param: str) -> None:
        """Refuses what cannot fit however it is split: to tokenize 10 MB takes most of a minute, and others wait."""
        if len(text) > self._most_characters:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, more than the model's context can hold; shorten the prompt",
                param,
            )

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size < AT_ONCE:
            return work()
        threads = self._short if size < LONG else self._long if size <= self._most_characters else self._beyond
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def close(self) -> None:
        for threads in (self._short, self._long, self._beyond):
            threads.shutdown(wait=False, cancel_futures=True)


def longest_token(tokenizer: Tokenizer) -> int:
    """Most characters of a text that one token stands for; with room for a normalizer, which may shorten the text."""
    longest = max(map(len, tokenizer.backend.get_vocab()), default=1)
    return longest if tokenizer.backend.normalizer is None else 4 * longest


def render_chat(tokenizer: Tokenizer, messages: Sequence[ChatMessage], rendering: ChatRendering) -> str:
    """The conversation as the model reads it, up to where its answer begins.

    Raises:
        InvalidRequestError: the template refuses these messages, or does not write the last one where it is to be
            continued.
    """
    plain = [message.for_template() for message in messages]
    if not rendering.continue_final:
        text = tokenizer.render_chat(
            plain, add_generation_prompt=rendering.add_generation_prompt, **rendering.variables
        )
        return begun(text, rendering.suffix)
    # Templates trim messages and end them with tokens of their own: a mark tells where the last one ends.
    mark = secrets.token_hex(16)
    plain[-1] = plain[-1] | {"content": plain[-1]["content"] + mark}
    text, found, _ = tokenizer.render_chat(plain, add_generation_prompt=False, **rendering.variables).rpartition(mark)
    if not found:
        raise InvalidRequestError("the model's chat template cannot continue a message", "continue_final_message")
    return text


def begun(text: str, answer: str) -> str:
    """A rendered chat and the beginning of its answer, which comes after any reasoning."""
    if answer and reasoning.is_open(text):
        text += f"\n{reasoning.CLOSE}\n\n"
    return text + answer
