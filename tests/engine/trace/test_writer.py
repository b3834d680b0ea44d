"""What a source writes through a TraceWriter is a run like any other."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.environment import version
from engine.trace.facts import RunFacts, SourceFacts
from engine.trace.store import TraceStore
from engine.trace.writer import FAILED, TraceWriter, this_engine

SERVER = SourceFacts("llama-server", "b9999")


def begun(store: TraceStore | None = None) -> TraceWriter:
    return TraceWriter.begin(store or TraceStore(), SERVER, {"options": {"n_predict": 2}})


def test_a_source_needs_neither_torch_nor_qt() -> None:
    code = (
        "import sys; import engine.trace.writer, engine.trace.export, engine.trace.reopen;"
        "print([m for m in sys.modules if m.partition('.')[0] in ('torch', 'PySide6')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_rows_belong_to_the_run_and_know_their_source() -> None:
    store = TraceStore()
    store.begin_run({})
    writer = begun(store)
    writer.append("rounds", round=0, seq_id=0, num_emitted=1, draft_ms=None)
    writer.extend(
        "tokens", {"round": [0, 0], "seq_id": [0, 0], "pos": [0, 1], "kind": ["prompt"] * 2}
    )
    assert store.rounds.row(0)["run_id"] == 1
    assert store.rounds.row(0)["draft_ms"] is None
    assert store.tokens.column("run_id").tolist() == [1, 1]
    assert store.runs[1]["source"] == {"engine": "llama-server", "version": "b9999"}
    assert this_engine() == SourceFacts("draftscope", version())


def test_bytes_of_a_token_are_asked_for_once() -> None:
    writer, asked = begun(), []

    def piece(token: int) -> bytes:
        asked.append(token)
        return bytes([token])

    writer.learn([1, 2, 1], piece)
    writer.learn((2, 3), piece)
    assert asked == [1, 2, 3]
    assert writer.store.pieces == {1: b"\1", 2: b"\2", 3: b"\3"}


def test_a_run_ends_once_with_its_figures() -> None:
    writer = begun()
    writer.append("rounds", round=0, seq_id=0, num_emitted=1, verify_width=3)
    assert not writer.ended
    writer.end(["limit"])
    writer.append("rounds", round=1, seq_id=0, num_emitted=1, num_draft_tokens=0)
    writer.end(["stopped"])
    assert writer.ended
    assert writer.facts["stops"] == ["limit"]
    assert writer.facts["summary"]["predicted_n"] == 1


def test_whoever_sees_the_end_sees_the_figures() -> None:
    writer, order = begun(), []

    class Facts(RunFacts):
        def __setitem__(self, key: str, value: object) -> None:
            order.append(key)
            super().__setitem__(key, value)

    writer.facts = Facts()
    writer.fail("It broke.")
    assert order == ["summary", "stops"]
    assert "error" in writer.facts


def test_a_failed_run_has_an_end() -> None:
    writer = begun()
    writer.fail("The device went away.")
    writer.fail("Another.")
    assert (writer.facts["error"], writer.facts["stops"]) == ("The device went away.", [FAILED])


def test_an_error_behind_the_end_is_kept_beside_it() -> None:
    writer = begun()
    writer.end(["stopped"])
    TraceWriter(writer.store, writer.run_id).fail("It could not be stopped.")
    assert writer.facts["stops"] == ["stopped"]
    assert writer.facts["error"] == "It could not be stopped."


def test_a_source_says_what_it_derived() -> None:
    columns = {"rounds": {"draft_ms": "derived", "kv_cells_used": "absent"}}
    writer = TraceWriter.begin(TraceStore(), SERVER, {}, columns=columns)
    assert writer.facts["columns"] == columns


@pytest.mark.parametrize(
    ("table", "column", "state"),
    [("rounds", "draft_ns", "derived"), ("laps", "run_id", "derived"), ("rounds", "t_ms", "felt")],
)
def test_a_column_that_does_not_exist_has_no_state(table: str, column: str, state: str) -> None:
    with pytest.raises(ValueError, match=column):
        TraceWriter.begin(TraceStore(), SERVER, {}, columns={table: {column: state}})
