"""Guesses in scopes: what is made otherwise there, and right elsewhere."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.audit.deviations import CLEAN, TAKEN_BACK, Deviation
from engine.audit.draft_models import Entries, StepwiseModel
from engine.audit.recorded_drafts import DraftedText, RecordedDraft, Redrafts
from engine.observe.drafter_diff import guesses
from engine.observe.drafter_diff.guesses import Guess, Trials
from engine.observe.drafter_diff.mistakes import Mistakes


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
        raise AssertionError

    def at_step(self, given: Any, handed: list[Entries], seq: int) -> Any:
        handed.append(given)
        return self.more

    def draft(self, newest: Entries, *more: Any, **options: Any) -> Any:
        handed: list[Entries] = []
        return [self.at_step(newest, handed, 0) for _ in range(4)]


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
        model.write_left(
            Entries([6, 7, 8], [0] * 3)
        )  # in the draft's second step, third and fourth
    assert model.written == [7, 6, 17, 18]


def test_what_goes_by_the_text_alone_needs_no_drafts_before() -> None:
    guess, *_ = _guess()
    assert not guess.goes_by_drafts
    for deviation, goes in (
        (Deviation("", "", row_shift=-1), False),
        (Deviation("", "", lacks=range(4), places=range(9)), False),
        (Deviation("", "", n_kept=1), True),
        (Deviation("", "", drift=1), True),
    ):
        assert replace(guess, deviation=deviation).goes_by_drafts == goes
    assert replace(guess, left={3: Entries([4], [0])}).goes_by_drafts


def test_two_mistakes_are_made_at_once_where_they_change_two_things() -> None:
    right, text, _ = _guess()
    rows = replace(right, about="Rows are zeros.", text=replace(text, table=torch.zeros(8, 1)))
    choice = replace(right, stage="candidates", about="Rank 2.", change=lambda row, _: row)
    both = rows.together(choice, right)
    assert both is not None and both.text is rows.text and both.change is choice.change
    assert (both.stage, both.about) == ("block", "Rows are zeros. In addition: rank 2.")
    assert rows.together(replace(rows, text=replace(text, starts=[3])), right) is None


class _Wrong(Trials):
    """Two of three tokens of each draft are wrong by its rows, the second by the choice, too."""

    def left(self, guess: Guess, drafts: Any, most: float = 9e9, n_kept: int = 0) -> Any:
        has_rows = guess.text is not self._text
        return {draft.round: 1.0 if has_rows else 3.0 for draft in drafts}


@pytest.mark.parametrize("by_chance", [False, True])
def test_what_one_mistake_leaves_is_given_by_another(
    monkeypatch: pytest.MonkeyPatch, by_chance: bool
) -> None:
    right, text, model = _guess()
    text = replace(text, drafts=_rounds())
    right = replace(right, text=text)

    def apart(guess: Guess | None) -> Any:
        is_it = guess is not None and guess.change is not None
        is_it = is_it and (by_chance or (guess is not None and guess.steps == {1}))
        return lambda draft, rows: 0.0 if is_it and rows == ["its"] else 3.0

    def of(self: Redrafts, drafts: Any, *_: Any) -> dict[int, float]:
        return {draft.round: self._apart(draft, ["its"]) for draft in drafts}  # type: ignore[list-item]

    monkeypatch.setattr(Redrafts, "of", of)
    monkeypatch.setattr(Trials, "_keep", lambda *_: 0)
    rows = replace(right, about="Rows are zeros.", text=replace(text, table=torch.zeros(8, 1)))
    choice = replace(right, about="Rank 2.", change=lambda row, _: row)
    nothing: Any = {draft.round: [] for draft in text.drafts}
    trials = _Wrong(model, text, (nothing, nothing), apart)
    guesses = [(rows, 0.34, False), (choice, 0.34, False)]
    best, left = trials.best(guesses, *[text.drafts] * 3, text.drafts[:1], [])
    if by_chance:  # most others give it, too
        assert best is None
        return
    assert best is not None and not sum(left.values())
    assert best.about == "Rows are zeros. In addition: rank 2, only in drafted token 1."


def test_what_gives_the_same_drafts_is_said_with_the_first_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, text, model = _guess()
    text = replace(text, drafts=_rounds())
    gives = ("Twice", "Half", "Zero")

    def left(self: Trials, guess: Guess, drafts: Any, *_: Any) -> dict[int, float]:
        return {draft.round: 3.0 * (guess.about[:4] not in gives) for draft in drafts}

    monkeypatch.setattr(Trials, "left", left)
    monkeypatch.setattr(Trials, "_keep", lambda *_: 0)
    nothing: Any = {draft.round: [] for draft in text.drafts}
    trials = Trials(model, text, (nothing, nothing), lambda _: lambda *_: 3.0)
    abouts = ["Half as 2.", "Half as 4.", "Half as 4.", "Ones.", "Zero.", "Zero 5."]
    tried = [(replace(right, about=about, text=text), 0.34, False) for about in abouts]
    tried.insert(5, (replace(tried[4][0], stage="candidates", about="Zero at all."), 0.34, False))
    best, _ = trials.best(tried, *[text.drafts] * 3, text.drafts[:1], [])
    others = "These would give the same drafts: Half as 4. Or: Zero. Or: Zero at all. Or: Zero 5."
    assert best is not None and best.about == f"Half as 2. {others}"
    parts = [(guess, share, True) for guess, share, _ in tried]
    few, _ = trials.best(parts, *[text.drafts] * 3, text.drafts[:1], [])
    assert few is not None and few.stage == "unexplained"
    which = "Half as 2. Or: Zero. Or: Zero at all. Or: Zero 5."
    assert few.about == f"Too few drafts are wrong to be sure of the cause. It may be: {which}"
    # where hardly any of many gives a draft, three of them are no chance
    many = [parts[3]] * 60 + parts
    best, _ = trials.best(many, *[text.drafts] * 3, text.drafts[:1], [])
    assert best is not None and best.about == f"Half as 2. {others}"


def test_parts_have_their_time_whatever_the_others_took(monkeypatch: pytest.MonkeyPatch) -> None:
    right, text, model = _guess()
    text, now = replace(text, drafts=_rounds()), [0.0]

    def left(self: Trials, guess: Guess, drafts: Any, *_: Any) -> dict[int, float]:
        now[0] += guesses._SECONDS * (guess.about == "Slow.")
        return {draft.round: 3.0 * (guess.about != "Half.") for draft in drafts}

    monkeypatch.setattr(Trials, "left", left)
    monkeypatch.setattr(Trials, "_keep", lambda *_: 0)
    monkeypatch.setattr(guesses, "thread_time", lambda: now[0])
    nothing: Any = {draft.round: [] for draft in text.drafts}
    trials = Trials(model, text, (nothing, nothing), lambda _: lambda *_: 3.0)
    tried = [("Slow.", False)] * 2 + [("Ones.", True)] * 60 + [("Half.", True)]
    given = [(replace(right, about=about, text=text), 0.34, part) for about, part in tried]
    best, _ = trials.best(given, *[text.drafts] * 3, text.drafts[:1], [])
    assert best is not None and best.about == "Half."
    given[2:2] = [(given[0][0], 0.34, True)] * 2  # parts that take all of it
    assert trials.best(given, *[text.drafts] * 3, text.drafts[:1], [])[0] is None


_ROUNDS = [(2, 0), (3, 2), (6, 1)]
"""Positions of drafts, and how many of their three tokens were accepted."""


def _rounds() -> list[RecordedDraft]:
    return [
        RecordedDraft(i, pos0, [1, 2, 5], [], n, 0, 0.0, 3) for i, (pos0, n) in enumerate(_ROUNDS)
    ]


@pytest.mark.parametrize(
    ("during", "written", "after_none", "after_two"),
    [
        ("alone", [2, 13, 4, 5, 6], [10] * 4, [0, 10, 10, 10]),
        ("joined", [12, 3, 14, 15, 16], [0] * 4, [10, 0, 0, 0]),
        ("later", [2, 3, 4, 5, 6], [0, 10, 10, 10], [0, 10, 10, 10]),
    ],
)
def test_a_change_acts_in_passes_of_some_rows(
    during: str, written: list[int], after_none: list[int], after_two: list[int]
) -> None:
    guess, text, model = _guess(during=during)
    text = replace(text, drafts=_rounds())
    one = replace(guess, text=text, changes=((model, "more", 10),))
    with one.applied():
        model.write(Entries([2, 3, 4, 5, 6], [0] * 5))
        found = [model.draft(Entries([at], [0]), at, None, 4) for at in (3, 6)]
    assert (model.written, found) == (written, [after_none, after_two])


@pytest.mark.parametrize(("which", "tokens"), [("rejected", [1, 5]), ("last", [5, 5])])
def test_drafts_go_on_from_a_token_of_the_draft_before(which: str, tokens: list[int]) -> None:
    _, text, model = _guess()
    first, *drafts = _rounds()
    text, how = replace(text, drafts=[first, *drafts]), Deviation("", "", guessed=which)
    redrafts = Redrafts(model, text, how)
    assert [redrafts._goes_on_from(draft, how) for draft in drafts] == tokens
    assert redrafts._goes_on_from(first, how) is None


def test_positions_may_not_be_taken_back_after_a_rejection() -> None:
    """Of a draft that follows another at once, by the tokens that were rejected of that one."""
    _, text, model = _guess()
    first, *drafts = _rounds()
    text, how = replace(text, drafts=[first, *drafts]), Deviation("", "", off=TAKEN_BACK)
    redrafts = Redrafts(model, text, how)
    found = [redrafts._n_before(draft, how.off) for draft in [first, *drafts]]
    rejected = [one.n_drafted - one.n_accepted for one in text.drafts]
    assert found == [0, *rejected[:-1]] and any(found)
    apart = replace(text, drafts=[first, drafts[0]._replace(pos0=first.pos0 + 40)])
    assert Redrafts(model, apart, how)._n_before(apart.drafts[1], how.off) == 0


class _Written(_Sums):
    """Keeps which tokens are written, and those that drafts go on from."""

    can_cut = True

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[list[int]] = []
        self.left, self.kept, self._written = Entries((), ()), range(99), 0

    def write(self, entries: Entries) -> None:
        self.tokens.append([*entries.tokens])

    def clear(self) -> None:
        self.kept = range(0)

    def lose(self, stop: int, start: int = 0) -> None:
        self.kept = range(stop, 99)

    def cut(self, start: int) -> None:
        pass

    def draft(self, newest: Entries, *more: Any, **options: Any) -> Any:
        self.tokens.append([*newest.tokens, -1])
        return [{5: 1.0}]


@pytest.mark.parametrize(
    ("how", "tokens"),
    [
        (Deviation("", "", token_shift=1), [[1], [2, -1]]),
        (Deviation("", "", token_shift=1, spares=True), [[1, 2], [2, -1]]),
        (Deviation("", ""), [[0, 1], [2, -1]]),
    ],
)
def test_the_newest_entry_may_be_right_where_others_are_moved(
    how: Deviation, tokens: list[list[int]]
) -> None:
    _, text, _ = _guess()
    model, text = _Written(), replace(text, table=None, drafts=_rounds())
    Redrafts(model, text, how, distance=lambda *_: 0.0).of(text.drafts[:1])
    assert model.tokens[:2] == tokens


@pytest.mark.parametrize(("only", "kept"), [("attention", range(2, 99)), ("", range(0))])
def test_memory_is_emptied_whole_or_of_its_cells_alone(only: str, kept: range) -> None:
    _, text, _ = _guess()
    model, text = _Written(), replace(text, table=None, drafts=_rounds())
    how = Deviation("", "", forgets=True, only=only)
    Redrafts(model, text, how, distance=lambda *_: 0.0).of(text.drafts[:1])
    assert model.kept == kept


def test_a_draft_up_to_its_first_wrong_token_is_made_after_what_came_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, text, model = _guess()
    text, seen = replace(text, drafts=_rounds()), list[int]()
    monkeypatch.setattr(_Sums, "clear", lambda self: None, raising=False)
    monkeypatch.setattr(Redrafts, "_draft", lambda self, one, n: (seen.append(self._end) or 0.0, n))
    last = text.drafts[2]
    Redrafts(model, text, Deviation("", "", late=True)).of([last._replace(tokens=last.tokens[:1])])
    assert seen == [text.drafts[1].pos0 - model.ahead]


class _Told(StepwiseModel):
    """Keeps what its steps read; each gives a row of its own number."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int, float]] = []
        self._steady, self._stride = False, 1

    def _pass(self, ubatch: Any, rows: Any) -> None:
        raise AssertionError

    def _step(self, ubatch: Any, rows: Any) -> Any:
        self.read.append((ubatch.positions.item(), ubatch.tokens.item(), rows.item()))
        return torch.tensor([[3.0, 0.0]]), torch.tensor([[float(len(self.read))]])


@pytest.mark.parametrize(
    ("about", "steps", "read"),
    [
        ("", None, [(4, 9, 0), (5, 1, 1), (6, 2, 2), (7, 3, 3)]),
        ("the row that a step reads while it drafts is that of the previous step", None, "0012"),
        ("the row that a step reads while it drafts is that of the previous step", [3], "0122"),
        ("the row that a step reads while it drafts is what the previous step", [2, 3], "0111"),
        ("the token that a step reads while it drafts is that of the previous step", None, "9912"),
        ("the position of a step is one too far", [2], "4577"),
        ("to the next one is about 2 times", None, "0246"),
    ],
)
def test_a_step_reads_another_part_of_what_is_handed_on(
    about: str, steps: list[int] | None, read: Any
) -> None:
    model, text = _Told(), DraftedText(0, range(8), [2], None, [])
    mistakes = Mistakes.__new__(Mistakes)
    mistakes._model, mistakes._text, mistakes._in_trees = model, text, False
    model.core = SimpleNamespace()
    found = [one for one in mistakes._of_steps() if about and about in one.about.lower()]
    one = found[0] if about else Guess("", ".", CLEAN, text, model)
    scoped = one if steps is None else one.within((", there", None, steps), text)
    assert scoped is not None
    newest = Entries([4], [9], torch.zeros(1, 1))
    with scoped.applied():
        model.draft(newest, 5, [1, 2, 3, 0], 4, in_place=True)
    if isinstance(read, str):
        column = ["position" in about, "token" in about, True].index(True)
        assert [one[column] for one in model.read] == [*map(int, read)]
    else:
        assert model.read == read


class _Branches(StepwiseModel):
    """Token 1 is always the best one; what is removed from its memory is kept."""

    def __init__(self, lost: str) -> None:
        self._memory, self.removed = self, list[tuple[int, int]]()  # type: ignore[assignment]
        self.lost, self._steady, self._stride = lost, False, 1

    def seq_rm(self, seq: int, start: int, stop: int) -> None:
        self.removed.append((start, stop))

    def _pass(self, ubatch: Any, rows: Any) -> None:
        raise AssertionError

    def _step(self, ubatch: Any, rows: Any) -> Any:
        return torch.tensor([[0.0, 3.0, 1.0]]), None


@pytest.mark.parametrize(("lost", "start"), [("all", 0), ("drafted", 5), ("", None)])
def test_a_branch_lacks_what_was_before_it(lost: str, start: int | None) -> None:
    model = _Branches(lost)
    model._draft(Entries([4], [0]), 5, [1, 2, 1], 3, 0)
    assert model.removed == ([] if start is None else [(start, 6)])


def test_later_passes_of_a_draft_leave_what_was_accepted_of_it() -> None:
    _, text, model = _guess()
    model.n_true = lambda n_accepted, n_drafted: 1 + min(n_accepted, n_drafted - 1)
    text = replace(text, drafts=_rounds())
    # of the second draft two tokens were accepted; the first of each round is the newest one
    assert text.alone(model, newest=False) == {4, 5}
    assert text.alone(model) == {3, 4, 5, 6}
