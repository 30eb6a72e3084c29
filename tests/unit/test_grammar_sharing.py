"""Outputs of one grammar share the states of its lexer, and neither what others did with them nor their memory."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.grammar import SHARED_SECONDS, SPARE_SECONDS, STEP_SECONDS
from scheduler.constraint import ConstraintError
from scheduler.structured_outputs import StructuredOutputs
from tests.unit.cpu_clock import CpuClock
from tests.unit.grammar_walk import make_compiler, tokens_of
from tests.unit.tiny_tokenizers import byte_level, sentencepiece_style

STATES = 1_000
MANY_STATES = "(.*a.{30}){3}"
FORCED_BEGINNING = "Begin: " + MANY_STATES


@pytest.fixture(scope="module", params=[byte_level, sentencepiece_style])
def compiler(request, tmp_path_factory):
    return make_compiler(request.param, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def few_states(compiler, monkeypatch):
    monkeypatch.setattr("cluster.grammar_compiler.MAX_LEXER_STATES", STATES)
    compiler._cache.clear()


def join(compiler, regex, count):
    """So many outputs of one grammar, and a list that grows with each time it is built again."""
    grammars = [compiler.compile(StructuredOutputs(regex=regex)) for _ in range(count)]
    compiled, built = grammars[0].compiled, []
    assert all(grammar.compiled is compiled for grammar in grammars)
    build = compiled._build
    compiled._build = lambda: built.append(1) or build()
    return grammars, built


def step(grammar, rng=None):
    """A mask and a token that it allows, the first or any."""
    mask = np.zeros(grammar.mask_words, dtype=np.int32)
    grammar.fill_mask(mask)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    grammar.accept([int(allowed[0] if rng is None else rng.choice(allowed))])
    return mask


def use_up(grammar):
    """All states there are, for this output."""
    rng = np.random.default_rng(0)
    with pytest.raises(ConstraintError, match="too many states"):
        for _ in range(5_000):
            step(grammar, rng)


@pytest.mark.parametrize("regex", [MANY_STATES, FORCED_BEGINNING])
def test_an_output_that_uses_up_the_states_ends_alone(compiler, regex):
    (hostile, *others, late), built = join(compiler, regex, 5)
    text = tokens_of(compiler, "Begin: aXb")
    for grammar in others:
        grammar.accept(text)
    rng = np.random.default_rng(1)
    while not built:
        step(hostile, rng)
    for grammar in others:
        step(grammar)
    use_up(hostile)
    late.accept(text)
    step(late)
    assert all(np.array_equal(step(late), step(grammar)) for grammar in others)
    assert len(built) == 2  # one for the hostile output, and one for all others
    step(compiler.compile(StructuredOutputs(regex=regex)))


def test_an_output_that_has_a_grammar_for_itself_does_not_build_it_again(compiler):
    [grammar], built = join(compiler, MANY_STATES, 1)
    use_up(grammar)
    assert not built
    step(compiler.compile(StructuredOutputs(regex=MANY_STATES)))


def test_many_that_use_up_the_states_end_all_the_same(compiler):
    grammars, built = join(compiler, MANY_STATES, 4)
    for grammar in grammars:
        use_up(grammar)
    assert len(built) <= 2 * len(grammars)
    with pytest.raises(ConstraintError, match="too many states"):
        step(grammars[0])


def test_a_token_that_is_not_allowed_moves_nobody(compiler):
    (wrong, other), built = join(compiler, MANY_STATES, 2)
    with pytest.raises(ConstraintError, match="cannot go on"):
        wrong.accept([compiler._eos_token_ids[0]])
    step(other)
    assert not built and other.compiled is wrong.compiled


def test_to_go_on_elsewhere_is_charged_while_it_lasts(compiler, monkeypatch):
    (hostile, other), built = join(compiler, MANY_STATES, 2)
    other.accept(tokens_of(compiler, "aXb" * 200))
    use_up(hostile)
    monkeypatch.setattr("cluster.grammar.time", clock := CpuClock(SPARE_SECONDS / 8))
    with pytest.raises(ConstraintError, match="beyond 5 ms each"):
        step(other)
    assert clock.now < 2 * SPARE_SECONDS  # not all 200 tokens
    assert len(built) == 2


def test_what_a_failed_or_much_used_grammar_holds_is_not_kept(compiler, monkeypatch):
    form = StructuredOutputs(regex=MANY_STATES)
    failed = compiler.compile(form)
    use_up(failed)
    used = compiler.compile(form)
    assert used.compiled is not failed.compiled
    assert compiler.compile(form).compiled is used.compiled
    monkeypatch.setattr("cluster.grammar.time", clock := CpuClock(STEP_SECONDS))
    while clock.now < 3 * SHARED_SECONDS:  # read at the beginning and at the end of each: half of it counts
        step(used)
    assert [kept.join() for kept in compiler._cache.values()] == [None]
    assert compiler.compile(form).compiled is not used.compiled
    step(used)
