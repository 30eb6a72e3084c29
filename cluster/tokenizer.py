"""`Tokenizer`: text to token ids and back, the chat template, and the ids that end a sequence.

Built on the fast `tokenizers` library and tokenizer.json alone, without importing transformers (seconds, and torch
with it); transformers is used only for checkpoints that have no tokenizer.json. Every method is safe to call from
many threads at once: nothing is changed after construction.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from cluster.chat_template import ChatTemplate
from cluster.errors import InvalidRequestError, ModelLoadError
from cluster.token_bytes import TokenBytes

logger = logging.getLogger(__name__)


class Tokenizer:
    """The tokenizer of the checkpoint in `path`.

    Raises:
        ModelLoadError: no tokenizer files, or of a kind that has no fast tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config: dict[str, Any] = read_json(self.path / "tokenizer_config.json")
        self.backend = load_backend(self.path)
        # padding and truncation are per-tokenizer state in that library; a server wants neither
        self.backend.no_padding()
        self.backend.no_truncation()

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included. The model's vocabulary may be larger (padding)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the tokenizer puts around a text (often a BOS)."""
        # the batch call, of one text: it lets other threads run meanwhile, and computes no offsets
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; ids that the tokenizer does not know give nothing."""
        return self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], /, **kwargs: Any) -> list[int]:
        """Token ids of a rendered chat; keyword arguments go to the template (`tools=`, `enable_thinking=`, ...).

        Raises:
            InvalidRequestError: the model has no chat template, or the template refuses the messages.
        """
        return self.encode(self.render_chat(messages, **kwargs), add_special_tokens=False)

    def render_chat(self, messages: Sequence[dict[str, Any]], /, **kwargs: Any) -> str:
        """The chat as the model reads it; `add_generation_prompt=False` leaves out the answer's beginning."""
        if self.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template; send a plain prompt to /v1/completions instead", "messages"
            )
        return self.chat_template.render(messages, **kwargs)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The checkpoint's chat template, if it has one."""
        return ChatTemplate.from_checkpoint(self.path, self.config)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends a sequence: generation_config.json's id or list, else the tokenizer's, else config.json's."""
        ids = eos_of(self.path / "generation_config.json")
        if not ids and (token := token_text(self.config.get("eos_token"))):
            ids = as_ids(self.backend.token_to_id(token))
        return ids or eos_of(self.path / "config.json")

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """What each token adds to the text, for incremental detokenisation."""
        return TokenBytes(self.backend)


def has_tokenizer(path: Path) -> bool:
    """Whether the checkpoint has a tokenizer's files, readable or not."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return any((path / name).is_file() for name in names)


def load_tokenizer(path: Path) -> Tokenizer | None:
    """None for a checkpoint without tokenizer files: it serves token ids."""
    if not has_tokenizer(path):
        logger.warning("no text, token ids only: %s has no tokenizer", path)
        return None
    return Tokenizer(path)


def load_backend(path: Path) -> tokenizers.Tokenizer:
    """The fast tokenizer: from tokenizer.json, or converted by transformers from a slow one's files."""
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ModelLoadError(f"cannot read {file}: {error}") from error
    if not has_tokenizer(path):
        raise ModelLoadError(f"{path} has no tokenizer (no tokenizer.json, tokenizer.model or vocab.json)")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(path)).backend_tokenizer
    except Exception as error:  # whatever the conversion trips over
        raise ModelLoadError(f"{path} has no tokenizer.json, and its tokenizer cannot be converted: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty when there is no such file.

    Raises:
        ModelLoadError: the file is not a JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"cannot read {path}: it is not a JSON object")
    return values


def eos_of(path: Path) -> tuple[int, ...]:
    """The `eos_token_id` in a configuration file: one id, several or none.

    Raises:
        ModelLoadError: the file is not a JSON object, or that is not token ids.
    """
    try:
        return as_ids(read_json(path).get("eos_token_id"))
    except ValueError as error:
        raise error if isinstance(error, ModelLoadError) else ModelLoadError(f"cannot read {path}: {error}") from error


def as_ids(value: Any) -> tuple[int, ...]:
    """One id, several or none, as a tuple without repeats in their order. Raises ValueError for what is no id."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < 2**31:
            raise ValueError(f"eos_token_id: {token!r} is not a token id")
    return tuple(dict.fromkeys(ids))


def token_text(value: str | dict[str, Any] | None) -> str | None:
    """tokenizer_config.json holds special tokens as a string or as an AddedToken object."""
    return value.get("content") if isinstance(value, dict) else value
