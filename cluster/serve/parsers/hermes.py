"""Hermes' format, which Qwen2.5 and Qwen3 use too: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Reference: https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

import json
from collections.abc import Collection

from cluster.serve.parsers.base import CallDelta, CallReader, ToolParser, held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Content may come before, between and after calls; whitespace around calls is not content."""

    AFTER_CALL = "\n" + CLOSE
    BETWEEN_CALLS = "\n" + CLOSE + "\n"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._text = ""  # not looked at yet
        self._reader: CallReader | None = None
        self._announced = False  # the call that is being read has been handed out
        self._at_edge = False  # nothing but whitespace since a call's end tag
        self._closing = False  # after a call's JSON, before its end tag

    @staticmethod
    def taught_by(template: str) -> bool:
        return OPEN in template

    @staticmethod
    def prefix(name: str | None) -> str:
        return OPEN + '\n{"name": "' if name is None else OPEN + f'\n{{"name": {json.dumps(name)}, "arguments":'

    def feed(self, text: str, final: bool = False) -> tuple[str, list[CallDelta]]:
        self._text += text
        content, deltas = "", []
        while True:
            if self._reader is not None:
                more, goes_on = self._read_call(deltas, final)
            elif self._closing:
                more, goes_on = "", self._skip_end_tag(final)
            else:
                more, goes_on = self._read_content(final)
            content += more
            if not goes_on:
                return content, deltas

    def _read_content(self, final: bool) -> tuple[str, bool]:
        if self._at_edge:
            self._text = self._text.lstrip()
            self._at_edge = not self._text
        before, tag, after = self._text.partition(OPEN)
        if tag:
            self._text, self._reader, self._announced = after, CallReader(self.names), False
            return before.rstrip(), True
        if final:
            self._text = ""
            return (before.rstrip() if self.calls else before), False
        keep = held_back(before, OPEN)
        sure = before[: len(before) - keep].rstrip()  # whitespace may turn out to stand before a call
        self._text = before[len(sure) :]
        return sure, False

    def _read_call(self, deltas: list[CallDelta], final: bool) -> tuple[str, bool]:
        reader = self._reader
        self._text = self._text[reader.feed(self._text) :]
        if reader.name is not None and not reader.failed:
            name = None
            if not self._announced:
                self._announced, self.calls, name = True, self.calls + 1, reader.name
            arguments = reader.take_arguments()
            if name or arguments:
                deltas.append(CallDelta(self.calls - 1, name, arguments))
        if reader.done:
            self._reader, self._closing = None, True
            return "", True
        if reader.failed or final:
            self._reader = None
            if self._announced:  # what was handed out stays; the broken rest of the call is of no use
                self._closing = not final
                return "", self._closing
            return OPEN + reader.raw, True
        return "", False

    def _skip_end_tag(self, final: bool) -> bool:
        """True when content goes on."""
        before, tag, after = self._text.partition(CLOSE)
        opened = before.find(OPEN)
        if tag and opened < 0:
            self._text, self._closing, self._at_edge = after, False, True
            return True
        if opened >= 0:  # the next call, without the end of the last
            self._text, self._closing = self._text[opened:], False
            return True
        self._text = "" if final else self._text
        return False
