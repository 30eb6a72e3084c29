"""Chat templates: the Jinja program in a checkpoint that turns messages into the text its model was trained on.

The environment (trimmed blocks, loop controls, `raise_exception`, `strftime_now`, `tojson` without HTML escapes) is
what Hugging Face templates are written for: https://huggingface.co/docs/transformers/chat_templating
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.errors import InvalidRequestError, ModelLoadError

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """A compiled template with the checkpoint's special tokens. Rendering changes nothing and is thread-safe.

    Raises:
        ModelLoadError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self.source = source
        self.special_tokens = special_tokens
        # sandboxed: the template comes with the checkpoint and must not reach into this process
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
        )
        environment.filters["tojson"] = to_json
        environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
        try:
            self.template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the chat template is not valid: {error}") from error

    @classmethod
    def from_checkpoint(cls, path: Path, tokenizer_config: dict[str, Any]) -> ChatTemplate | None:
        """chat_template.jinja, else the one in tokenizer_config.json (of several, the one named `default`)."""
        file = path / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else tokenizer_config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not source:
            return None
        tokens = {name: tokenizer_config.get(name) for name in SPECIAL_TOKENS}
        texts = {
            name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items() if token
        }
        return cls(source, texts)

    def render(
        self, messages: Sequence[dict[str, Any]], /, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The chat as text.

        Args:
            messages: `{"role": ..., "content": ...}` each; what else may be in them is the template's matter.
            add_generation_prompt: end with the beginning of the assistant's answer.
            variables: further template variables, of any names.

        Raises:
            InvalidRequestError: the template refuses the messages; its own words are in the error.
        """
        defaults = {"tools": None, "documents": None} | self.special_tokens
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self.template.render(defaults | variables | given)  # not as keywords: one may be named `self`
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Templates' `tojson`: plain JSON; Jinja's own escapes &, < and > for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def raise_exception(message: str) -> NoReturn:
    """What templates call on messages they cannot express."""
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    """The local time now, for templates that put today's date into the system prompt."""
    return datetime.now().strftime(format)
