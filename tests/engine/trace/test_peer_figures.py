"""Figures that another engine gave of its run: they go before those of the rows, and reopen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import TraceFileError
from engine.trace.export import SESSION_FILE, export_csv
from engine.trace.facts import SourceFacts
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore
from engine.trace.timings import summary
from engine.trace.writer import TraceWriter

TOLD: dict[str, Any] = {
    "predicted_n": 29,
    "predicted_per_second": None,
    "draft_acceptance_rate": 0.5,
    "acceptance_histogram": [1, 2],
    "acceptance_per_position": {
        "unconditional": [2 / 3],
        "unconditional_given_drafted": [None],
        "conditional": [2 / 3],
    },
}


def store_of(**facts: Any) -> TraceStore:
    store = TraceStore()
    writer = TraceWriter.begin(store, SourceFacts("other", "1"), facts)
    writer.append("rounds", round=0, seq_id=0, num_emitted=1, verify_width=3)
    writer.append(
        "rounds", round=1, seq_id=0, num_draft_tokens=3, num_accepted_draft_tokens=1, num_emitted=2
    )
    writer.end(["stop"])
    return store


def test_rows_without_times_have_no_speed() -> None:
    figures = summary(store_of(), 0)
    assert figures["predicted_n"] == 3
    for name in ("predicted_ms", "predicted_per_second", "predicted_per_second_n_gen"):
        assert figures[name] is None


def test_what_was_told_goes_before_the_rows() -> None:
    store = store_of(told=TOLD, requests=[{"seq_ids": [0], "told": {"predicted_n": 7}}])
    assert store.runs[0]["summary"]["predicted_n"] == 29
    assert summary(store, 0)["predicted_per_second"] is None
    assert summary(store, 0)["num_spec_steps"] == 1, "not reported, but the rows know"
    assert summary(store, 0, 0)["predicted_n"] == 7
    assert summary(store, 0, 1)["predicted_n"] == 0


def test_what_was_told_opens_again(tmp_path: Path) -> None:
    export_csv(store_of(told=TOLD, requests=[{"told": TOLD, "record": {"a": [1]}}]), tmp_path)
    again = open_trace(tmp_path)
    assert summary(again, 0)["acceptance_histogram"] == [1, 2]
    assert again.runs[0]["requests"][0]["record"] == {"a": [1]}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("told", []),
        ("told.predicted_n", "29"),
        ("told.acceptance_histogram", 3),
        ("told.acceptance_histogram", [1, -1]),
        ("told.acceptance_per_position", {"unconditional": [[]]}),
        ("told.acceptance_per_position", {"unconditional": [0.5]}),
        ("speculative_types", "draft-mtp"),
        ("told_timings", {}),
        ("told_timings", [{"predicted_n": 3}]),
        ("told_timings", [dict.fromkeys(("predicted_n", "prompt_ms"), "3")]),
        ("requests", [{"seq_ids": 3}]),
        ("record", "vllm"),
        ("record.shape", 3),
        ("requests", {}),
        ("requests", [3]),
        ("requests", [{"told": 3}]),
        ("requests", [{"record": "x"}]),
        ("requests", [{"engine": 3}]),
    ],
    ids=str,
)
def test_facts_of_another_type_are_refused_by_name(tmp_path: Path, place: str, value: Any) -> None:
    export_csv(store_of(told=dict(TOLD), record={}), tmp_path)
    session = json.loads((tmp_path / SESSION_FILE).read_bytes())
    *path, last = place.split(".")
    facts = session["runs"]["0"]
    for key in path:
        facts = facts[key]
    facts[last] = value
    (tmp_path / SESSION_FILE).write_text(json.dumps(session))
    with pytest.raises(TraceFileError, match=rf"runs\.0\.{place}"):
        open_trace(tmp_path)


COUNTERS = {
    "cache_n": 2,
    "prompt_n": 8,
    "prompt_ms": 40.0,
    "predicted_n": 11,
    "predicted_ms": 50.0,
    "draft_n": 12,
    "draft_n_accepted": 6,
}


def test_counters_of_a_sequence_without_rows_are_all_that_is_known() -> None:
    store = TraceStore()
    writer = TraceWriter.begin(store, SourceFacts("other", "1"), {"told_timings": [COUNTERS]})
    writer.end(["limit"])
    figures = store.runs[0]["summary"]
    assert {name: figures[name] for name in COUNTERS} == COUNTERS
    assert figures["draft_acceptance_rate"] == 0.5
    assert figures["prompt_per_second"] == 200
    assert figures["predicted_per_second"] == 200, "the first token is the prompt's"
    assert figures["predicted_per_second_n_gen"] == 220
    assert figures["num_spec_steps"] is None and figures["acceptance_per_position"] is None
    assert summary(store, 0, 0) == figures


def test_counters_beside_rows_tell_times_only() -> None:
    told = COUNTERS | {"predicted_n": 3, "draft_n": 3, "draft_n_accepted": 1}
    store = store_of(told_timings=[told])
    figures = summary(store, 0)
    assert figures["num_spec_steps"] == 1 and figures["predicted_n"] == 3
    assert figures["prompt_ms"] == 40 and figures["predicted_ms"] == 50
    assert figures["predicted_per_second"] == 40
    both = store_of(told_timings=[told, COUNTERS])
    assert summary(both, 0)["predicted_n"] == 14
    assert summary(both, 0)["draft_acceptance_rate"] == 7 / 15
    assert summary(both, 0)["num_spec_steps"] is None, "those of one sequence are not known"
    assert summary(both, 0)["predicted_per_second"] == 0, "when it generated is not known"
    assert summary(both, 0, 0)["num_spec_steps"] == 1
    assert summary(both, 0, 1)["predicted_n"] == 11
