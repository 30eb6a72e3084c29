"""Parsers of what models write: tool calls and reasoning. One is chosen by name, or from the chat template."""

from __future__ import annotations

from cluster.serve.parsers.base import CallDelta, ToolParser
from cluster.serve.parsers.hermes import HermesParser
from cluster.serve.parsers.llama3 import Llama3Parser
from cluster.serve.parsers.reasoning import ReasoningParser

__all__ = ["TOOL_PARSERS", "CallDelta", "ReasoningParser", "ToolParser", "choose_tool_parser", "has_reasoning"]

TOOL_PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3_json": Llama3Parser}


def choose_tool_parser(name: str, template: str | None) -> type[ToolParser] | None:
    """The parser of this name; `auto`: the one whose format the chat template teaches; None if there is none.

    A template that does not look at `tools` has none whatever the name: the model would never hear of them.
    """
    if name == "none" or template is None or "tools" not in template:
        return None
    if name == "auto":
        return next((parser for parser in TOOL_PARSERS.values() if parser.taught_by(template)), None)
    return TOOL_PARSERS[name]


def has_reasoning(name: str, template: str | None) -> bool:
    """Whether answers may begin with `<think>`; `auto`: if the chat template knows of it."""
    return name == "think" or (name == "auto" and template is not None and "</think>" in template)
