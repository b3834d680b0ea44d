"""Guesses in scopes: what is made otherwise there, and right elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.audit.deviations import CLEAN
from engine.audit.draft_models import Entries, StepwiseModel
from engine.audit.recorded_drafts import DraftedText
from engine.observe.drafter_diff.guesses import Guess


class _Sums(StepwiseModel):
    """Adds `more` to what is written and to each step's row."""

    more = 0

    def __init__(self) -> None:
        self.written: list[int] = []

    def _pass(self, ubatch: Any, rows: Any) -> None:
        raise AssertionError

    def write(self, entries: Entries) -> None:
        self.written += [at + self.more for at in entries.positions]

    def _step(self, ubatch: Any, rows: Any) -> Any:
        return self.more

    def draft(self, newest: Entries, *more: Any, **options: Any) -> Any:
        return [self._step(None, None) for _ in range(4)]


def _guess(**parts: Any) -> tuple[Guess, DraftedText, _Sums]:
    text, model = DraftedText(0, range(8), [2], torch.ones(8, 1), []), _Sums()
    return Guess("block", "It adds.", CLEAN, text, model, **parts), text, model


def test_rows_are_other_ones_in_a_scope_alone() -> None:
    guess, text, _ = _guess()
    guess = replace(guess, text=replace(text, table=torch.zeros(8, 1)))
    one = guess.within((", at two places", {3, 4}, None), text)
    assert one is not None and one.about == "It adds, at two places."
    # the newest row after n tokens is that of the last of them
    assert one.text.table is not None
    assert one.text.table.flatten().tolist() == [1, 1, 0, 0, 1, 1, 1, 1]


def test_a_change_acts_in_a_scope_alone_and_is_undone() -> None:
    guess, text, model = _guess()
    guess = replace(guess, changes=((model, "more", 10),))
    one = guess.within((", late", range(5, 99), None), text)
    assert one is not None
    with one.applied():
        model.write(Entries([2, 3, 4, 5], [0] * 4))
        before, after = (model.draft(Entries([at], [0]), at, None, 4) for at in (4, 5))
    assert model.written == [2, 3, 14, 15]
    assert (before, after) == ([0] * 4, [10] * 4)
    model.write(Entries([7], [0]))
    assert model.written[-1] == 7


def test_a_change_acts_in_some_steps_of_a_draft() -> None:
    guess, text, model = _guess(during="draft")
    scope = ", from the third token on", None, range(2, 99)
    assert guess.within(scope, text) is None  # it changes nothing
    one = replace(guess, changes=((model, "more", 10),)).within(scope, text)
    assert one is not None
    with one.applied():
        model.write(Entries([7], [0]))
        assert model.draft(Entries([5], [0]), 5, None, 4) == [0, 0, 10, 10]
    assert model.written == [7]
