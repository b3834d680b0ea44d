"""Where in a text a drafter's mistakes may be."""

from __future__ import annotations

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
