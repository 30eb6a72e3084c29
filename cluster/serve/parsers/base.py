"""What a tool parser is, and the reader of one call's JSON that all of them share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class CallDelta:
    """Part of a tool call. The first part of a call has its `name`; `arguments` is the next piece of a JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


class ToolParser(ABC):
    """Turns the text of one answer, as it comes, into content and tool calls.

    Args:
        names: the functions that may be called. A call of another one is left in the content as it was written.

    `AFTER_CALL` is what follows the JSON of a call, `BETWEEN_CALLS` what stands between that of one and the `prefix` of
    the next.
    """

    AFTER_CALL: ClassVar[str]
    BETWEEN_CALLS: ClassVar[str]

    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        self.calls = 0  # begun so far

    @staticmethod
    @abstractmethod
    def taught_by(template: str) -> bool:
        """Whether this chat template teaches the model this format."""

    @staticmethod
    @abstractmethod
    def prefix(name: str | None) -> str:
        """How a call of this function begins, up to its arguments; None: of any function, up to its name.

        An answer that is made to begin with it is a call. Feed it to the parser first.
        """

    @abstractmethod
    def feed(self, text: str, final: bool = False) -> tuple[str, list[CallDelta]]:
        """Content and parts of calls that this further text completes; `final`: nothing comes after it."""


class CallReader:
    """Reads one JSON object with a function's name and arguments, in any order, piece by piece.

    Argument text is handed out as it comes, once the name is known. What is no such object, or names a function that
    is not in `names`, is `failed`; `raw` is all that was read.
    """

    ARGUMENT_KEYS = frozenset({"arguments", "parameters"})

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.name: str | None = None
        self.done = False
        self.failed = False
        self.raw = ""
        self._expect = "{"  # then: key, :, value, "," in turn
        self._key = ""
        self._value: list[str] | None = None  # characters of the value that is being read
        self._nesting = 0  # brackets open inside it
        self._in_string = False
        self._escaped = False
        self._arguments = ""  # text that waits to be handed out
        self._streams = False  # the value that is being read is arguments, and an object
        self._has_arguments = False

    def feed(self, text: str) -> int:
        """Read on; returns how many characters were used: fewer than given once it is `done` or `failed`."""
        for number, character in enumerate(text):
            if self.done or self.failed:
                return number
            self.raw += character
            self._read(character)
        return len(text)

    def take_arguments(self) -> str:
        """Argument text that came since the last time; nothing before the name is known."""
        if self.name is None:
            return ""
        taken, self._arguments = self._arguments, ""
        if self.done and not self._has_arguments:
            self._has_arguments = True
            taken = "{}"
        return taken

    def _read(self, character: str) -> None:
        if self._value is not None:
            self._read_value(character)
        elif not character.isspace():
            self._read_structure(character)

    def _read_structure(self, character: str) -> None:
        expect = self._expect
        if expect == "{" and character == "{":
            self._expect = "key"
        elif expect in ("key", "value"):
            if character == "}" and expect == "key":
                self._end()
            elif expect == "key" and character != '"':
                self.failed = True
            else:
                self._begin_value(character)
        elif expect == ":" and character == ":":
            self._expect = "value"
        elif expect == "," and character == ",":
            self._expect = "key"
        elif expect == "," and character == "}":
            self._end()
        else:
            self.failed = True

    def _begin_value(self, character: str) -> None:
        self._value = [character]
        self._in_string = character == '"'
        self._nesting = 1 if character in "{[" else 0
        self._streams = self._expect == "value" and character == "{" and self._key in self.ARGUMENT_KEYS
        if self._streams:
            self._has_arguments = True
            self._arguments += character

    def _read_value(self, character: str) -> None:
        if not self._in_string and not self._nesting:  # a number, true, false or null ends with what follows it
            if character in ",}" or character.isspace():
                self._end_value()
                self._read(character)
            else:
                self._value.append(character)
            return
        self._value.append(character)
        if self._streams:
            self._arguments += character
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._nesting += 1
        elif character in "}]":
            self._nesting -= 1
        if not self._in_string and not self._nesting:
            self._end_value()

    def _end_value(self) -> None:
        text, self._value = "".join(self._value), None
        if self._streams:
            self._streams = False
            self._expect = ","
            return
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            self.failed = True
            return
        if self._expect == "key":
            self._key, self._expect = value, ":"
            return
        self._expect = ","
        if self._key == "name":
            self.failed = not isinstance(value, str) or value not in self._names
            self.name = None if self.failed else value
        elif self._key in self.ARGUMENT_KEYS and value is not None:
            self._has_arguments = True
            self._arguments += value if isinstance(value, str) else text

    def _end(self) -> None:
        self.done = self.name is not None
        self.failed = not self.done


def held_back(text: str, tag: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `tag`."""
    longest = min(len(tag) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if tag.startswith(text[-size:])), 0)
