"""Llama 3's JSON format: the whole answer is `{"name": ..., "parameters": {...}}`, several separated by `;`.

Reference: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/#json-based-tool-calling
"""

from __future__ import annotations

import json
from collections.abc import Collection

from cluster.serve.parsers.base import CallDelta, CallReader, ToolParser, held_back

PYTHON_TAG = "<|python_tag|>"  # some models write it before their calls


class Llama3Parser(ToolParser):
    """An answer that does not begin with a call is content to its end."""

    AFTER_CALL = ""
    BETWEEN_CALLS = "; "

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._text = ""  # not looked at yet
        self._reader: CallReader | None = None
        self._announced = False
        self._is_content = False

    @staticmethod
    def taught_by(template: str) -> bool:
        return "<|start_header_id|>" in template and '"parameters"' in template

    @staticmethod
    def prefix(name: str | None) -> str:
        return '{"name": "' if name is None else f'{{"name": {json.dumps(name)}, "parameters":'

    def feed(self, text: str, final: bool = False) -> tuple[str, list[CallDelta]]:
        self._text += text
        content, deltas = "", []
        while not self._is_content and self._text:
            if self._reader is None and not self._begin(final):
                break
            if self._reader is not None:
                content += self._read_call(deltas)
        if final and self._reader is not None and not self._announced:
            content += self._reader.raw
            self._reader = None
        if self._is_content:
            content, self._text = content + self._text, ""
        return content, deltas

    def _begin(self, final: bool) -> bool:
        """At the answer's beginning, or after a call: True when it is decided what comes."""
        rest = self._text.lstrip(" \n\t\r;" if self.calls else " \n\t\r")
        if not self.calls and rest.startswith(PYTHON_TAG):
            self._text = rest[len(PYTHON_TAG) :]
            return True
        if not rest or (not final and not self.calls and held_back(rest, PYTHON_TAG) == len(rest)):
            if final:
                self._text, self._is_content = ("" if self.calls else self._text), True
            return final
        if rest.startswith("{"):
            self._text, self._reader, self._announced = rest, CallReader(self.names), False
        else:
            self._is_content = True
        return True

    def _read_call(self, deltas: list[CallDelta]) -> str:
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
            self._reader = None
        elif reader.failed:
            self._reader, self._is_content = None, True
            return "" if self._announced else reader.raw
        return ""
