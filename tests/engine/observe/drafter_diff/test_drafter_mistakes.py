"""Where in a text a drafter's mistakes may be."""

from __future__ import annotations

from itertools import islice
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.audit.recorded_drafts import DraftedText, RecordedDraft
from engine.observe.drafter_diff import mistakes
from engine.observe.drafter_diff.mistakes import Mistakes
from engine.observe.drafter_diff.operations import PartChange
from engine.observe.drafter_diff.tensor_changes import rounded_by_pass
from engine.observe.drafter_diff.wrong_drafts import places_of


def test_rows_may_be_wrong_in_a_beginning_of_the_prompt_or_in_all_but_its_end() -> None:
    draft = RecordedDraft(1, 20, [7, 7], [], 1, 0, 0.0, 2)
    places = places_of(DraftedText(0, range(30), [20, 22], None, [draft]))
    assert places["the first 8 tokens"] == range(8)
    assert places["the prompt except its last 8 tokens"] == range(12)
    assert places["accepted tokens"] == [21]
    assert "the first 32 tokens" not in places
    assert places["the prompt's last 8 tokens"] == range(12, 20)
    assert places["every third token from 2 on"] == range(2, 30, 3)


def test_rows_may_be_rounded_with_one_scale_for_a_pass() -> None:
    table = torch.tensor([[4.0, 1.0], [8.0, 1.0], [0.3, 1.0]])
    found = rounded_by_pass(3, [2, 1], table)
    assert found.tolist() == [[pytest.approx(16 / 3), 0], [8, 0], [pytest.approx(1 / 3), 1]]


def test_rows_before_passes_of_a_prompt_may_be_those_of_their_ends() -> None:
    made: Any = Mistakes.__new__(Mistakes)
    made._text = DraftedText(0, range(14), [11, 12], torch.arange(14.0)[:, None], [])
    made._model = None
    found = {
        one.about: one.text.table.flatten().tolist() for one in islice(made._of_some_rows(), 10)
    }
    later = "of 4 tokens, its last 4 tokens in a separate pass"
    apart = found[f"Rows before a prompt's later passes, {later}, are the last of these."]
    assert apart == [0, 1, 2, 6, 4, 5, 10, 7, 8, 9, 10, 11, 12, 13]
    first = found["Rows of a prompt's later passes, of 4 tokens, are those of the first."]
    assert first[:12] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 11]


@pytest.mark.parametrize(("n_wrong", "n_alike", "kept"), [(3, 40, []), (9, 30, [7]), (3, 3, [7])])
def test_a_value_is_kept_where_others_would_hardly_give_the_same_by_chance(
    n_wrong: int, n_alike: int, kept: list[int]
) -> None:
    made: Any = Mistakes.__new__(Mistakes)
    made._right_before = lambda draft: None
    random, values = Random(3), range(125)
    alike = [{7, *random.sample(values, n_alike)} for _ in range(n_wrong)]
    assert made._fitting(alike, values, lambda draft, _, value: value in draft) == kept


def test_a_number_of_a_kernel_is_tried_before_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, core = RecordedDraft(1, 1, [7], [], 1, 0, 0.0, 1), SimpleNamespace(x=1)
    made: Any = Mistakes.__new__(Mistakes)
    made._text, made._model = (
        DraftedText(0, [1, 2], [1], None, [draft]),
        SimpleNamespace(core=core, ahead=0, cells=None, n_true=lambda *_: 1),
    )
    made._session, made._special = SimpleNamespace(model=None), []
    changes = ((core, "x", 2),)
    found = [
        PartChange("positions", "a table", changes),
        PartChange("block", "a matrix", changes),
        PartChange("block", "a number", changes, is_number=True),
    ]
    monkeypatch.setattr(mistakes, "part_changes", lambda *_: iter(found))
    monkeypatch.setattr(mistakes, "of_cells", lambda _: iter(()))
    assert [one.about for one in made.of_parts()] == ["A number.", "A table.", "A matrix."]
