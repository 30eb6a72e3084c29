"""Where each token begins in the text that tokens give: `text_offset` of a completion."""

from __future__ import annotations

from cluster.detokenizer import IncrementalDetokenizer
from cluster.tokenizer import Tokenizer


class TextOffsets:
    """Offsets in characters of one sequence of tokens. What is not text counts nothing: a special token that is left
    out, and a part of a character, which counts with the token that completes it.

    Args:
        start: characters of the text before these tokens.
        continues_text: see `IncrementalDetokenizer`.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, start: int = 0, continues_text: bool = True
    ) -> None:
        self._text = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, continues_text=continues_text
        )
        self._next = start

    def add(self, token: int) -> int:
        """The offset of the next token."""
        begin = self._next
        self._next += len(self._text.add([token]).text)
        return begin


def offsets_in_text(tokenizer: Tokenizer, tokens: list[int], text: str) -> list[int]:
    """The offset of each token of an encoded `text`.

    A special token counts where the text has it. The tokenizer may have put others around it, and a space before it
    or after a special token.
    """
    table = tokenizer.token_bytes
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    offsets, begin = [], 0
    for token in tokens:
        offsets.append(min(begin, len(text)))
        if token in table.special and not text.startswith(table[token].decode(errors="replace"), begin):
            continue
        piece = detokenizer.add([token]).text
        added = piece[:1] == " " and not text.startswith(piece, begin) and text.startswith(piece[1:], begin)
        begin += len(piece) - added
    return offsets
