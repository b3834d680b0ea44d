"""The engine that tests put after the window writes what the real one writes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from app.engine_thread.events import OpenRequest, RunRequest
from app.engine_thread.opening import LocalEngine
from engine.options import RunOptions, SpecOptions
from engine.trace.store import TraceStore
from resources import DEMO_TARGET, demo_prompts
from tests.support.fake_session import FakeEngine

OPTIONS = RunOptions(n_predict=44, spec=SpecOptions(types=("draft-mtp",)), rollback="planes")
Columns = dict[tuple[str, str], set[str]]


def played(engine: LocalEngine | FakeEngine, target: Path, options: RunOptions) -> TraceStore:
    """A whole run after the protocols that the window's thread uses."""
    trace = TraceStore()
    session = engine.open(OpenRequest(target, (), "f32"), lambda *_: None)
    run = session.start(RunRequest((demo_prompts()[0],), options), trace)
    while run.advance():
        pass
    run.stop()
    session.close()
    return trace


def kind_of(table: str, row: dict[str, object]) -> str:
    """Rows of one kind have the same columns filled."""
    if table == "rounds":
        if row["num_draft_tokens"] is None:
            return "prompt"
        return "draft" if row["num_draft_tokens"] else "plain"
    if table == "drafts":
        return "drafted" if row["num_draft_tokens"] else "nothing"
    return str(row.get("kind") or row.get("purpose") or "")


def filled(trace: TraceStore) -> Columns:
    """The columns that any row of a kind has values in."""
    found: Columns = defaultdict(set)
    for name, table in trace.tables.items():
        for i in range(len(table)):
            row = table.row(i)
            values = {k: v[0] if isinstance(v, list) else v for k, v in row.items()}
            known = {column for column, value in values.items() if value not in (None, "")}
            found[name, kind_of(name, row)] |= known
    return dict(found)


@pytest.fixture(scope="module")
def real() -> tuple[TraceStore, TraceStore]:
    engine = LocalEngine()
    plain = RunOptions(n_predict=4)
    return played(engine, DEMO_TARGET, OPTIONS), played(engine, DEMO_TARGET, plain)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.thinned(4)
def test_the_same_columns_are_filled(
    real: tuple[TraceStore, TraceStore], which: int, tmp_path: Path
) -> None:
    engine = FakeEngine()
    double = played(engine, tmp_path / "x.gguf", (OPTIONS, RunOptions(n_predict=4))[which])
    there, here = filled(real[which]), filled(double)
    assert set(here) <= set(there), "rows of a kind that the engine does not write"
    tables = {table for table, _ in there} - {"findings"}  # its audit, which the double has not
    assert {table for table, _ in here} == tables
    assert here == {kind: there[kind] for kind in here}


@pytest.mark.parametrize("which", [0, 1])
def test_the_same_facts_are_known(
    real: tuple[TraceStore, TraceStore], which: int, tmp_path: Path
) -> None:
    double = played(FakeEngine(), tmp_path / "x.gguf", (OPTIONS, RunOptions(n_predict=4))[which])
    facts, wanted = double.runs[0], real[which].runs[0]
    assert set(facts) == set(wanted) - {"audit"}  # the double has no text to decode again
    assert set(facts["summary"]) == set(wanted["summary"])
    assert facts["options"] == wanted["options"]


def test_a_stopped_run_has_its_end(tmp_path: Path) -> None:
    trace = TraceStore()
    session = FakeEngine().open(OpenRequest(tmp_path / "x.gguf", (), "f32"), lambda *_: None)
    run = session.start(RunRequest(("a b",), OPTIONS), trace)
    run.step()
    run.stop()
    assert trace.runs[run.run_id]["stops"] == ["stopped"]
