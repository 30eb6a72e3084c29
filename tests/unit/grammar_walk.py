"""Grammars token by token, on tiny tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from cluster.grammar_compiler import GrammarCompiler
from cluster.tokenizer import Tokenizer
from scheduler.structured_outputs import StructuredOutputs

REFUSED, UNFINISHED, MAY_END, MUST_END = "refused", "unfinished", "may end", "must end"


def make_compiler(make_tokenizer: Callable[[Path], str], path: Path) -> GrammarCompiler:
    """For one of `tiny_tokenizers`, and a model with a few ids more."""
    tokenizer = Tokenizer(make_tokenizer(path))
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 40, (tokenizer.backend.token_to_id("</s>"),))


def tokens_of(compiler: GrammarCompiler, text: str) -> list[int]:
    return compiler._vocabulary.tokenize_str(text)


def walk(compiler: GrammarCompiler, form: StructuredOutputs, text: str) -> str:
    """What becomes of `text`: REFUSED somewhere, UNFINISHED, or at its end it MAY END or MUST END."""
    grammar = compiler.compile(form)
    mask = np.zeros(grammar.mask_words, dtype=np.int32)

    def allows(token: int) -> bool:
        return bool(mask[token // 32] >> (token % 32) & 1)

    for token in tokens_of(compiler, text):
        grammar.fill_mask(mask)
        assert mask.any() and not mask[-1]  # ids that the tokenizer does not have
        if not allows(token):
            return REFUSED
        grammar.accept([token])
    grammar.fill_mask(mask)
    may_end = allows(compiler._eos_token_ids[0])
    assert may_end or not grammar.is_complete
    return MUST_END if grammar.is_complete else MAY_END if may_end else UNFINISHED
