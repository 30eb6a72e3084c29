"""`IncrementalDetokenizer`: the text of a growing token sequence, with stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable
from typing import NamedTuple

from cluster.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """New text of one stream.

    `stopped`: a stop string was found, the stream's text is complete and the request can be aborted.
    `stop_reason`: which one.
    """

    text: str
    stopped: bool = False
    stop_reason: str | None = None


class IncrementalDetokenizer:
    """The text of one stream, token by token; not thread-safe, one per stream.

    Cost per token does not depend on the text's length. No delta ends inside a UTF-8 character: its bytes wait for
    the rest, and what is left of one at the end becomes U+FFFD. Text that may be the beginning of a stop string
    waits too. Together the deltas are the full decode, up to the stop string.

    Args:
        tokenizer: the model's.
        stop: strings that end the text. The one that is complete first wins; of those that
            are complete with the same character, the longest.
        skip_special_tokens: leave control tokens out of the text.
        stop_token_ids: tokens that end the sequence; they are not part of the text.
        include_stop: a stop string that was found stays in the text.
        continues_text: the tokens continue a text (a completion), so keep a space at their beginning; sentencepiece
            tokenizers drop it at the beginning of a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Iterable[str] = (),
        skip_special_tokens: bool = True,
        stop_token_ids: Collection[int] = (),
        continues_text: bool = False,
        include_stop: bool = False,
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        special = self._token_bytes.special if skip_special_tokens else frozenset()
        self._not_text = special.union(stop_token_ids) if stop_token_ids else special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._spaces_to_drop = 0 if continues_text else self._token_bytes.leading_spaces
        self._stops = StopStrings(stop, include_stop)
        self._closed = False

    def add(self, token_ids: Iterable[int], finished: bool = False) -> TextDelta:
        """The text that these tokens complete. `finished`: they are the last, so nothing is held back any more.

        After a stop string or `finished`, further tokens give nothing.
        """
        if self._closed:
            return TextDelta("")
        data = b"".join([self._token_bytes[id] for id in token_ids if id not in self._not_text])
        text = self._utf8.decode(data, final=finished)
        if self._spaces_to_drop:
            text = self._drop_spaces(text)
        text, reason = self._stops.add(text, finished)
        self._closed = finished or reason is not None
        return TextDelta(text, reason is not None, reason)

    def _drop_spaces(self, text: str) -> str:
        if not text:
            return text
        dropped = min(self._spaces_to_drop, len(text) - len(text.lstrip(" ")))
        self._spaces_to_drop = self._spaces_to_drop - dropped if dropped == len(text) else 0
        return text[dropped:]


class StopStrings:
    """Finds stop strings in text that arrives in pieces, whatever the pieces are."""

    def __init__(self, stop: Iterable[str], include: bool = False) -> None:
        self._include = include
        self._stop = [text for text in stop if text]
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""

    def add(self, text: str, finished: bool) -> tuple[str, str | None]:
        """Text that can be sent, and the stop string that ends it, if one was completed."""
        if not self._stop:
            return text, None
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return text[: end if self._include else start], stop
        keep = 0 if finished else self._may_begin_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def _may_begin_stop(self, text: str) -> int:
        """Length of the longest end of `text` that is a stop string's beginning."""
        longest = min(self._longest - 1, len(text))
        return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stop)), 0)
