"""Some runs of a trace as a trace of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.trace.export import export_csv
from engine.trace.facts import ForkOrigin
from engine.trace.reopen import open_trace
from engine.trace.run_ref import RunColumns, RunRef, trace_of
from tests.support.trace_builder import TraceBuilder, sample_trace


def test_rows_and_facts_are_those_of_the_runs(tmp_path: Path) -> None:
    store = sample_trace(rounds=4).store
    for rounds in (3, 5):
        more = TraceBuilder(store)
        for _ in range(rounds):
            more.draft(["a"], "b", ["c"])
    run = RunRef(store, 2)
    run.facts.fork = ForkOrigin(parent=1, round=2)
    store.findings.append(run_id=2, rule="position-gap", severity="error", message="m")
    export_csv(trace_of([run, run.sibling(0)]), tmp_path / "some")
    again = open_trace(tmp_path / "some")
    assert len(again.runs) == 2 and again.runs[0].fork is None
    for new, old in ((0, 2), (1, 0)):
        for name, table in store.tables.items():
            mine = RunColumns(again, name, new)
            theirs = RunColumns(store, name, old)
            assert mine.n == theirs.n, name
            for column in table.columns:
                if column.name == "run_id":
                    continue
                rows = np.arange(mine.n)
                if column.kind == "text":
                    assert mine.texts(column.name, rows) == theirs.texts(column.name, rows)
                else:
                    np.testing.assert_array_equal(mine[column.name], theirs[column.name])
    assert again.runs[0].get("fork") is None


def test_a_fork_names_its_parent_by_its_new_number() -> None:
    store = sample_trace(rounds=2).store
    for number in (1, 2):
        store.begin_run({"stops": ["limit"]})
        RunRef(store, number).facts.fork = ForkOrigin(parent=number - 1, round=1)
    copy = trace_of([RunRef(store, 1), RunRef(store, 2)])
    assert copy.runs[0].fork is None
    assert copy.runs[1].fork is not None and copy.runs[1].fork.parent == 0
    assert store.runs[2].fork is not None and store.runs[2].fork.parent == 1
