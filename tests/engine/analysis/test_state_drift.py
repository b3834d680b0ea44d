"""Errors of states along the text, counted by hand."""

from __future__ import annotations

import math

import pytest

from engine.analysis.verdict import state_drift
from engine.trace.store import TraceStore
from tests.support.round_rows import add_draft, add_round, new_run


def test_the_worst_of_each_span_and_what_was_undone_until_then() -> None:
    store = TraceStore()
    new_run(store, "reference")
    lane = new_run(store, "planes", lane_against=0)
    add_round(store, 0, run_id=lane)
    n = 128
    for number in range(1, n + 1):
        add_draft(store, number, 3, number % 2, run_id=lane)  # undoes 2, 3, 2, 3, …
        for layer in (1, 4):
            store.states.append(
                run_id=lane,
                lane="planes",
                round=number,
                seq_id=0,
                pos=10 * number,
                layer=layer,
                state_error=layer * number * 1e-6 * (-1 if number % 2 else 1) + 1e-3,
                conv_error=math.nan,
            )
    first, second = state_drift(store, lane)
    assert (first["layer"], second["layer"], first["seq_id"]) == (1, 4, 0)
    assert first["pos"] == [20 * i for i in range(1, 65)]
    assert first["rejected"] == [5 * i for i in range(1, 65)]
    assert second["state_error"] == pytest.approx([8e-6 * i + 1e-3 for i in range(1, 65)])
    assert set(first["conv_error"]) == {None}
    assert state_drift(store, 0) == []
