"""Scripted drafts: as many right tokens as asked for, whatever the sequence is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.draft.drafter import DraftRequest
from engine.draft.scripted import ScriptedDrafter
from engine.errors import OptionError
from engine.options import Prompt
from tests.support.golden_runs import MTP_MODELS, golden, options_of, prompt_of, session

N_VOCAB = 11


def counting(prompt: Sequence[int], n: int = 40) -> Iterator[int]:
    """A continuation that depends on the prompt."""
    return ((prompt[-1] + 1 + i) % N_VOCAB for i in range(n))


def drafter(*n_right: int, n_max: int = 4) -> ScriptedDrafter:
    return ScriptedDrafter(n_right, n_max, N_VOCAB, counting)


def n_right(tokens: Sequence[int], expected: Sequence[int]) -> int:
    equal = [a == b for a, b in zip(tokens, expected, strict=False)]
    return equal.index(False) if False in equal else len(equal)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 10))
def test_each_draft_has_the_right_tokens_in_turn(script: list[int], last: int) -> None:
    scripted = drafter(*script)
    scripted.begin(0, [3, last])
    pos, true = 2, list(counting([3, last]))  # true[0] is the token at position 2
    for number in range(6):
        (draft,) = scripted.draft([DraftRequest(0, pos, true[pos - 2], 4)])
        k = script[number % len(script)]
        assert len(draft.tokens) == 4
        assert all(0 <= token < N_VOCAB for token in draft.tokens)
        assert n_right(draft.tokens, true[pos - 1 :]) == k
        pos += k + 1


def test_sequences_have_scripts_of_their_own() -> None:
    scripted = drafter(0, 4)
    for seq, last in ((0, 1), (1, 5)):
        scripted.begin(seq, [last])
    first = scripted.draft([DraftRequest(0, 1, 2, 4)])
    both = scripted.draft([DraftRequest(0, 2, 3, 4), DraftRequest(1, 1, 6, 3)])
    assert n_right(first[0].tokens, [3, 4, 5, 6]) == 0
    assert both[0].tokens == [4, 5, 6, 7]
    assert (len(both[1].tokens), n_right(both[1].tokens, [7, 8, 9])) == (3, 0)
    scripted.forget(1)
    scripted.begin(1, [7, 7])  # the slot is used again
    assert n_right(scripted.draft([DraftRequest(1, 2, 8, 4)])[0].tokens, [9]) == 0
    assert scripted.draft([DraftRequest(1, 3, 9, 4)])[0].tokens == [10, 0, 1, 2]


def test_nothing_is_made_up_about_confidence() -> None:
    scripted = drafter(2)
    scripted.begin(0, [1])
    (draft,) = scripted.draft([DraftRequest(0, 1, 2, 4)])
    assert draft.probs == [], "a script has no confidence"
    assert draft.top_ids == draft.top_probs == []
    assert draft.drafter == "scripted"


def test_the_end_of_the_continuation_is_no_error() -> None:
    scripted = ScriptedDrafter((4,), 4, N_VOCAB, lambda prompt: counting(prompt, 3))
    scripted.begin(0, [1])
    (draft,) = scripted.draft([DraftRequest(0, 1, 2, 4)])
    assert (draft.tokens[:2], len(draft.tokens)) == ([3, 4], 4)


@pytest.mark.parametrize("script", [(), (5,), (-1,), (0, 9)])
def test_numbers_that_make_no_draft(script: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match="is not within drafts of 4"):
        drafter(*script)


def test_with_a_model() -> None:
    name, options = MTP_MODELS[0], options_of(20)
    opened, prompt = session(name), prompt_of(name)
    scripted = ScriptedDrafter(
        (3,),
        5,
        opened.config.n_vocab,
        lambda tokens: opened.continuation(Prompt(tuple(tokens)), options),
    )
    true = golden(name)["greedy"].tolist()
    n = len(prompt.tokens)
    scripted.begin(0, prompt.tokens)
    (draft,) = scripted.draft([DraftRequest(0, n, true[0], 5)])
    assert n_right(draft.tokens, true[1:]) == 3
