"""What one token adds to the text, as bytes: the decoder of a fast tokenizer taken apart into a table.

Both kinds of tokenizer in use are concatenations at the level of bytes, so text can be built token by token:

- byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): each character of a token stands for one byte;
- sentencepiece-style with byte fallback (Llama 2, Mistral): a token is text with U+2581 for a space, or one byte
  `<0xAB>`; a space at the very beginning of a text is dropped.

A token may hold a part of a UTF-8 character, so only an incremental UTF-8 decoder may turn the bytes into text.
"""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

from cluster.errors import ModelLoadError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of each token id, worked out on first use.

    `special`: ids of control tokens, which are no part of the text. `leading_spaces`: how many spaces the decoder
    drops at the very beginning of a text.

    Raises:
        ModelLoadError: the tokenizer's decoder is of another kind.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        spec = json.loads(backend.to_str())
        self._backend = backend
        self.special = frozenset(token["id"] for token in spec["added_tokens"] if token["special"])
        self._table: dict[int, bytes] = {}
        steps = decoder_steps(spec["decoder"])
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._replace: list[tuple[str, str]] = []
        self.leading_spaces = 0
        for step in steps:
            self._read_step(step)
        if not steps:
            raise ModelLoadError("the tokenizer has no decoder, so its tokens cannot be turned into text one by one")

    def _read_step(self, step: dict[str, Any]) -> None:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"]:
            self._replace.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            self._replace.append((step["replacement"], " "))
            self.leading_spaces = 0 if step.get("prepend_scheme") == "never" else 1
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
            self.leading_spaces = step["start"]
        elif kind not in ("ByteLevel", "ByteFallback", "Fuse"):
            raise ModelLoadError(
                f"the tokenizer's decoder has a step of kind {kind} ({step}); known are byte-level BPE and "
                "sentencepiece with byte fallback"
            )

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; nothing for an id the tokenizer does not know."""
        piece = self._table.get(token_id)
        if piece is None:
            token = self._backend.id_to_token(token_id)
            piece = self._table[token_id] = b"" if token is None else self._encode(token)
        return piece

    def _encode(self, token: str) -> bytes:
        if self._byte_level:
            try:
                return bytes(BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token with characters outside the byte alphabet stands for itself
                return token.encode()
        if self._byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replace:
            token = token.replace(old, new)
        return token.encode()


def decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The decoder's steps in order, sequences flattened."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in decoder_steps(part)]
    return [decoder]


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: Latin-1's visible characters themselves, the rest from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = byte_alphabet()
