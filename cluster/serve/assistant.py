"""One assistant's answer, from text as it comes to the `delta` objects of a stream."""

from __future__ import annotations

import secrets
from typing import Any

from cluster.serve.errors import ToolCallError
from cluster.serve.messages import NamedTool
from cluster.serve.parsers import CallDelta, ReasoningParser, ToolParser, reasoning
from cluster.serve.protocol import ChatCompletionRequest
from cluster.serve.service import Service


class AnswerReader:
    """Splits an answer's text into reasoning, content and tool calls.

    Args:
        reasoning: None if the answer is all content.
        tools: None if no tools are offered.
        forced: the beginning of a call that the prompt gave the answer; the answer must be a call then.
        max_calls: further calls are dropped; None: no limit.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        forced: str = "",
        max_calls: int | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._must_call = bool(forced)
        self._first = tools.feed(forced) if forced else ("", [])

    def read(self, text: str, finish_reason: str | None) -> list[dict[str, Any]]:
        """The `delta` objects that this further text completes; `finish_reason`: of the last.

        Raises:
            ToolCallError: the answer ended without the call that it had to be.
        """
        final = finish_reason is not None
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.feed(text, final)
        parts: list[dict[str, Any]] = [{"reasoning_content": thought}] if thought else []
        if self._tools is None:
            return parts + ([{"content": text}] if text else [])
        content, calls = self._tools.feed(text, final)
        content, calls, self._first = self._first[0] + content, self._first[1] + calls, ("", [])
        if self._must_call:
            if final and not self._tools.calls:
                raise ToolCallError("the model did not write the tool call that 'tool_choice' requires")
            content = ""  # what surrounds the call
        if content:
            parts.append({"content": content})
        parts += [
            {"tool_calls": [_call_part(call)]}
            for call in calls
            if self._max_calls is None or call.index < self._max_calls
        ]
        return parts

    def finish_reason(self, reason: str) -> str:
        """The engine's reason, or `tool_calls` where an answer that ended by itself has some."""
        return "tool_calls" if reason == "stop" and self._tools is not None and self._tools.calls else reason


def _call_part(call: CallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def answer_readers(
    service: Service, request: ChatCompletionRequest, prompt: str, forced: str, choices: int
) -> list[AnswerReader]:
    """A reader for each choice. `prompt`: the rendered chat; `forced`: see `AnswerReader`."""
    names = [tool.function.name for tool in request.offered_tools]
    one_call = isinstance(request.tool_choice, NamedTool) or request.parallel_tool_calls is False
    thinks = service.has_reasoning and not forced
    return [
        AnswerReader(
            ReasoningParser(reasoning.is_open(prompt)) if thinks else None,
            service.tool_parser(names) if names else None,
            forced,
            1 if one_call else None,
        )
        for _ in range(choices)
    ]
