"""Reasoning between `<think>` and `</think>`, as Qwen3, DeepSeek-R1 and others write it before the answer."""

from __future__ import annotations

from cluster.serve.parsers.base import held_back

OPEN, CLOSE = "<think>", "</think>"


def is_open(prompt: str) -> bool:
    """Whether the prompt ends inside of reasoning that the chat template began."""
    return prompt.rstrip().endswith(OPEN)


class ReasoningParser:
    """Splits an answer, as it comes, into reasoning and the rest; whitespace around the tags belongs to neither.

    `opened`: the prompt began the reasoning.
    """

    def __init__(self, opened: bool) -> None:
        self._text = ""
        self._state = "reasoning" if opened else "start"
        self._at_edge = True  # nothing but whitespace since the last tag

    def feed(self, text: str, final: bool = False) -> tuple[str, str]:
        """(reasoning, rest) that this further text completes; `final`: nothing comes after it."""
        self._text += text
        reasoning = ""
        if self._state == "start":
            begun = self._text.lstrip()
            if begun.startswith(OPEN):
                self._text, self._state = begun[len(OPEN) :], "reasoning"
            elif final or not OPEN.startswith(begun):
                self._state, self._at_edge = "rest", False
            else:
                return "", ""
        if self._state == "reasoning":
            self._trim()
            before, tag, after = self._text.partition(CLOSE)
            if tag or final:
                reasoning, self._text = before.rstrip(), after
                self._state, self._at_edge = "rest", True
            else:
                keep = held_back(before, CLOSE)
                reasoning = before[: len(before) - keep].rstrip()
                self._text = before[len(reasoning) :]
                return reasoning, ""
        self._trim()
        rest, self._text = self._text, ""
        return reasoning, rest

    def _trim(self) -> None:
        if self._at_edge:
            self._text = self._text.lstrip()
            self._at_edge = not self._text
