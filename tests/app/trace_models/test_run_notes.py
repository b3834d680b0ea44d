"""What lists say of a run's prompt."""

from __future__ import annotations

from typing import Any

import pytest

from app.trace_models.run_notes import describe_prompt, notes_of, prompt_text, sent
from engine.trace import facts
from engine.trace.run_ref import RunRef
from engine.trace.typed_json import read_or
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


def test_of_a_thousand_requests_one_is_read_for_its_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    run, n_read = RunRef(sample_trace(rounds=2).store, 0), list[int]()
    run.facts["requests"] = [{"prompt": f"p {i}", "text": f"r {i}"} for i in range(1000)]

    def counting(hint: Any, value: Any, default: Any) -> Any:
        n_read.append(len(value))
        return read_or(hint, value, default)

    monkeypatch.setattr(facts, "read_or", counting)
    assert sent(run.facts, 7) == ("p 7", "r 7")
    assert sent(run.facts, 1000) == ("", "")
    assert sum(n_read) == 1
