"""Structured outputs through llguidance: from a JSON schema, regex, choice or grammar to a `Constraint`.

llguidance (https://github.com/guidance-ai/llguidance) runs a lexer of derivatives and an Earley parser over a trie of
the vocabulary; it prepares nothing per grammar, so compiling takes about a millisecond and a mask tens of microseconds.
It gives up the GIL for both. Its limits bound the work for one grammar and for one mask; an ambiguous grammar stays
below them and takes a hundred times as long as others, so `Grammar` keeps account of the time too. It is imported for
the first grammar: most servers never see one.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, partial
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from cluster.errors import InvalidRequestError
from cluster.grammar import CompiledGrammar, Grammar, short
from cluster.grammar_limits import check_multiples
from cluster.tokenizer import Tokenizer
from scheduler.request import Request
from scheduler.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    import llguidance

CACHED_GRAMMARS = 32
"""Up to 12 MB each when compiled, and what `SHARED_SECONDS` of use add."""
WHITESPACE = r"[ \t\r\n]{0,20}"
"""Between the parts of JSON: enough for indented text, and an end where a model would write blanks for ever."""
MAX_LEXER_STATES = 50_000
"""About 2 kB each."""
MAX_ROW_ITEMS = 5_000
"""Of the parser, after each byte: a list of choices has one for each, of which there may be 4,096."""
MAX_MASK_ITEMS = 10_000
"""Of the parser, for a mask: up to some 20 ms."""
MAX_SCHEMA_MASK_ITEMS = 50_000
"""The same with a JSON schema in it, whose are cheaper: some 20 ms too. n optional properties need n * n / 2."""
MARK = "\x02"
"""Put before a text that its tokenizer would begin with a space of its own; no token has it and anything else."""


class TokenTexts:
    """A vocabulary as llguidance asks for it: the bytes that our detokenizer makes of each token.

    Not its own reading of tokenizer.json, to which every added token like `<think>` is a control token that no text
    matches.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        table = tokenizer.token_bytes
        self.eos_token_id = eos_token_id
        self.tokens = [table[token] for token in range(vocab_size)]
        self.special_token_ids = sorted({*table.special, eos_token_id})
        self._tokenizer = tokenizer
        self._mark = MARK if table.leading_spaces else ""

    def __call__(self, text: str) -> list[int]:
        """How the model would write `text` in the middle of another."""
        ids = self._tokenizer.encode(self._mark + text, add_special_tokens=False)
        if not self._mark:
            return ids
        ends = (at for at, token in enumerate(ids, 1) if self.tokens[token].endswith(self._mark.encode()))
        at = next(ends, len(ids))
        return ids[at:]


class GrammarCompiler:
    """Compiles for one vocabulary, and keeps what was compiled last. Thread-safe; threads compile side by side, so that
    one grammar that takes long holds up no other.

    Args:
        tokenizer: None for a checkpoint that has none, and no structured outputs either.
        vocab_size: ids of the model.
        eos_token_ids: what ends an output that may end.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size if tokenizer is None else max(vocab_size, tokenizer.vocab_size)
        self._mask_words = -(-self._vocab_size // 32)
        self._eos_token_ids = list(eos_token_ids)
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, request: Request) -> None:
        """Give a request the constraint that its `structured_outputs` ask for; nothing for one without. Raises as
        `compile` does."""
        wanted = request.sampling.structured_outputs
        if wanted is not None:
            request.constraint = self.compile(wanted)

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """The grammar at its beginning. Takes up to seconds, for the first one also those to prepare the vocabulary.

        Raises:
            InvalidRequestError: it is wrong, uses what is not supported, or is too large, or llguidance is not
            installed; names its field.
        """
        try:
            text = grammar_text(wanted)
            grammar = self._join(text) or self._build(text)
        except RecursionError as error:
            raise InvalidRequestError(f"{wanted.field}: it is nested too deeply", wanted.field) from error
        except (ValueError, OverflowError) as error:
            raise InvalidRequestError(f"{wanted.field}: {short(str(error))}", wanted.field) from error
        with self._lock:
            self._cache[text] = grammar.compiled
            self._cache.move_to_end(text)
            if len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return grammar

    def _join(self, text: str) -> Grammar | None:
        with self._lock:
            compiled = self._cache.get(text)
            start = compiled.join() if compiled is not None else None
        return Grammar(compiled, start, self._mask_words) if start is not None else None

    def _build(self, text: str) -> Grammar:
        check_multiples(json.loads(text))
        library = llguidance_module()
        with self._lock:
            vocabulary = self._vocabulary
        limits = library.LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES,
            max_items_in_row=MAX_ROW_ITEMS,
            step_max_items=MAX_SCHEMA_MASK_ITEMS if '"json_schema"' in text else MAX_MASK_ITEMS,
            verbose_errors=False,
        )
        build = partial(library.LLMatcher, vocabulary, text, log_level=0, limits=limits)
        start = build()
        if start.is_error():
            raise ValueError(start.get_error())
        first = start.deep_copy()
        begin = time.thread_time()
        mask = np.frombuffer(first.compute_bitmask(), dtype=np.uint8)  # the dearest, and copies share what it found out
        if first.is_error():
            raise ValueError(first.get_error())
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        first_token = next(
            (int(token) for token in allowed if token not in self._eos_token_ids), self._eos_token_ids[0]
        )
        compiled = CompiledGrammar(start, build, first_token)
        grammar = Grammar(compiled, compiled.join(), self._mask_words)
        compiled.count(time.thread_time() - begin)
        return grammar

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None or not self._eos_token_ids:
            missing = "tokenizer" if self._tokenizer is None else "end-of-sequence token"
            raise ValueError(f"outputs cannot be constrained: this checkpoint has no {missing}")
        described = TokenTexts(self._tokenizer, self._vocab_size, self._eos_token_ids[0])
        return llguidance_module().LLTokenizer(described, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)


def llguidance_module() -> ModuleType:
    """The library. Raises InvalidRequestError where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise InvalidRequestError(
            f"this server cannot constrain outputs: llguidance cannot be imported ({error}); pip install llguidance"
        ) from error
    return llguidance


def grammar_text(wanted: StructuredOutputs) -> str:
    """`wanted` as llguidance's JSON: `{"grammars": [...]}`, one of them unless the request gave more.

    Raises ValueError for a grammar in neither syntax or an integer beyond 64 bits, InvalidRequestError without
    llguidance.
    """
    library = llguidance_module()
    if wanted.kind == "grammar":
        if wanted.grammar.lstrip().startswith("{"):  # llguidance's own: several grammars that use each other
            return wanted.grammar
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return _lark(any_to_lark(wanted.grammar))
        except Exception as error:
            raise ValueError(f"neither Lark's nor GBNF's syntax: {error}") from error
    if wanted.kind == "regex":
        return library.LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.kind == "choice":
        return _lark("start: " + " | ".join(map(quoted, wanted.choice)))
    schema = wanted.json_schema if wanted.json_schema is not None else {"type": "object"}
    try:
        return library.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise ValueError(f"a schema's integers must fit in 64 bits: {error}") from error


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def quoted(text: str) -> str:
    """A text as a literal of Lark's syntax."""
    return json.dumps(text, ensure_ascii=False)
