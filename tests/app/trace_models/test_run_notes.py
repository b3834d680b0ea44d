"""What lists say of a run's prompt."""

from __future__ import annotations

from typing import Any

from app.trace_models.run_notes import describe_prompt, notes_of, prompt_text
from engine.trace.run_ref import RunRef
from tests.support.trace_builder import sample_trace


def _turn(number: int, *said: str) -> dict[str, Any]:
    return {
        "conversation": 0,
        "number": number,
        "parent": number - 1 if number else None,
        "messages": [{"role": "user", "content": text} for text in said],
    }


def test_a_prompt_is_said_by_its_beginning() -> None:
    run = RunRef(sample_trace(rounds=2).store, 0)
    assert prompt_text(run) == "def quicksort(arr):"


def test_a_turn_is_said_by_what_was_said_last() -> None:
    run = RunRef(sample_trace(rounds=2).store, 0)
    for number, said in enumerate((["Be brief.", "Sort  it\nfast."], ["And then?"])):
        run.facts["turn"] = _turn(number, *said)
        describe_prompt(run)
        assert notes_of(run.facts).prompt == " ".join(said[-1].split())
    run.facts["turn"] = _turn(2)
    assert prompt_text(run) == "def quicksort(arr):", "nothing was said"
