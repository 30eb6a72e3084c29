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
        min_tokens: stop strings count from the token after so many on; one may have begun before.
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
        min_tokens: int = 0,
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        special = self._token_bytes.special if skip_special_tokens else frozenset()
        self._not_text = special.union(stop_token_ids) if stop_token_ids else special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._spaces_to_drop = 0 if continues_text else self._token_bytes.leading_spaces
        self._stops = StopStrings(stop, include_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._closed = False

    def add(self, token_ids: Iterable[int], finished: bool = False) -> TextDelta:
        """The text that these tokens complete. `finished`: they are the last, so nothing is held back any more.

        After a stop string or `finished`, further tokens give nothing.
        """
        if self._closed:
            return TextDelta("")
        early = ""
        if self._num_tokens < self._min_tokens:
            token_ids = list(token_ids)
            count = self._min_tokens - self._num_tokens
            early = self._stops.add_early(self._decode(token_ids[:count]))
            self._num_tokens += min(count, len(token_ids))
            token_ids = token_ids[count:]
        text, reason = self._stops.add(self._decode(token_ids, finished), finished)
        self._closed = finished or reason is not None
        return TextDelta(early + text, reason is not None, reason)

    def _decode(self, token_ids: Iterable[int], finished: bool = False) -> str:
        data = b"".join([self._token_bytes[id] for id in token_ids if id not in self._not_text])
        text = self._utf8.decode(data, final=finished)
        return self._drop_spaces(text) if self._spaces_to_drop else text

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
        self._early = 0  # characters of the held text in which no stop string may end

    def add_early(self, text: str) -> str:
        """Text that can be sent, of text in which no stop string may end yet."""
        if not self._stop:
            return text
        sent = self._hold(self._held + text, finished=False)
        self._early = len(self._held)
        return sent

    def add(self, text: str, finished: bool) -> tuple[str, str | None]:
        """Text that can be sent, and the stop string that ends it, if one was completed."""
        if not self._stop:
            return text, None
        text = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := text.find(stop, max(0, self._early - len(stop) + 1))) >= 0
        ]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return text[: end if self._include else start], stop
        sent = self._hold(text, finished)
        self._early = max(0, self._early - len(sent))
        return sent, None

    def _hold(self, text: str, finished: bool) -> str:
        """Hold back what may be a stop string's beginning; returns the rest."""
        sent = len(text) - (0 if finished else self._may_begin_stop(text))
        self._held = text[sent:]
        return text[:sent]

    def _may_begin_stop(self, text: str) -> int:
        """Length of the longest end of `text` that is a stop string's beginning."""
        longest = min(self._longest - 1, len(text))
        return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stop)), 0)
