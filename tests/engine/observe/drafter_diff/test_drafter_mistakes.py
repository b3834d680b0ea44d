"""Where in a text a drafter's mistakes may be."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from engine.audit.recorded_drafts import DraftedText, RecordedDraft
from engine.observe.drafter_diff.mistakes import Mistakes


def test_rows_may_be_wrong_in_a_beginning_of_the_prompt_or_in_all_but_its_end() -> None:
    made = Mistakes.__new__(Mistakes)
    draft = RecordedDraft(1, 20, [7, 7], [], 1, 0, 0.0, 2)
    made._text = DraftedText(0, range(30), [20, 22], None, [draft])
    places = made._places()
    assert places["the first 8 tokens"] == range(8)
    assert places["the prompt but its last 8 tokens"] == range(12)
    assert places["accepted tokens"] == [21]
    assert "the first 32 tokens" not in places


def test_rows_before_passes_of_a_prompt_may_be_those_of_their_ends() -> None:
    made: Any = Mistakes.__new__(Mistakes)
    made._text = DraftedText(0, range(14), [11, 12], torch.arange(14.0)[:, None], [])
    made._model = None
    found = {
        one.about: one.text.table.flatten().tolist() for one in islice(made._of_some_rows(), 10)
    }
    apart = found[
        "Rows before a prompt's later passes, of 4 tokens, its last 4 apart, are the last of these."
    ]
    assert apart == [0, 1, 2, 6, 4, 5, 10, 7, 8, 9, 10, 11, 12, 13]
    first = found["Rows of a prompt's later passes, of 4 tokens, are those of the first."]
    assert first[:12] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 11]
