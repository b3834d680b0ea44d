"""Traces of other versions of the schema: older ones open, newer ones lose nothing."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.errors import TraceFileError
from engine.trace import records
from engine.trace.export import SESSION_FILE, export_csv
from engine.trace.facts import RunFacts
from engine.trace.records import MISSING, SCHEMA_MINOR, SCHEMA_VERSION, TABLES, Column
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore

LATER = SCHEMA_MINOR + 1
TREE = Column("tree_width", "int", "branches of the draft", 0, 64, since=LATER)
WAIT = Column("wait_ms", "real", "waiting for the device", 0.0, since=LATER)
PAGES = (
    Column("run_id", "int", "run", required=True, least=0, since=LATER),
    Column("round", "int", "round", required=True, least=0, since=LATER),
    Column("kind", "text", "what it holds", since=LATER),
)


@contextmanager
def one_version_later() -> Iterator[None]:
    """The program as it may be one minor version later: two more columns and a table."""
    with pytest.MonkeyPatch.context() as patch:
        old = TABLES["rounds"]
        patch.setitem(TABLES, "rounds", (*old[:5], TREE, *old[5:], WAIT))
        patch.setitem(TABLES, "pages", PAGES)
        patch.setattr("engine.trace.export.SCHEMA_MINOR", LATER)
        yield


def columns_of(folder: Path, table: str) -> dict[str, list[str]]:
    with (folder / f"{table}.csv").open(newline="", encoding="utf-8-sig") as file:
        names, *rows = csv.reader(file)
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def session_of(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / SESSION_FILE).read_text("utf-8"))
    return found


def test_a_trace_of_an_older_minor_version_opens_with_new_columns_empty(
    small_trace: TraceStore, tmp_path: Path
) -> None:
    export_csv(small_trace, tmp_path / "old")
    with one_version_later():
        store = open_trace(tmp_path / "old")
        assert store.rounds.column("tree_width").tolist() == [MISSING] * 3
        assert store.rounds.row(1)["wait_ms"] is None
        assert store.rounds.row(1)["num_draft_tokens"] == 2
        assert len(store.tables["pages"]) == 0
        export_csv(store, tmp_path / "new")
        assert columns_of(tmp_path / "new", "rounds")["tree_width"] == [""] * 3
        assert session_of(tmp_path / "new")["schema_minor"] == LATER
        assert open_trace(tmp_path / "new").size() == small_trace.size()


def test_traces_from_before_minor_versions_open(small_trace: TraceStore, tmp_path: Path) -> None:
    export_csv(small_trace, tmp_path / "out")
    session = session_of(tmp_path / "out")
    for key in ("schema_minor", "unknown_columns", "columns"):
        del session[key]
    (tmp_path / "out" / SESSION_FILE).write_text(json.dumps(session))
    assert open_trace(tmp_path / "out").size() == small_trace.size()


@pytest.mark.parametrize("excel_safe", [False, True])
def test_what_a_newer_minor_version_wrote_is_kept_and_written_back(
    small_trace: TraceStore, tmp_path: Path, excel_safe: bool
) -> None:
    with one_version_later():
        newer = TraceStore()
        newer.runs.update({0: RunFacts({"later_fact": [1, {"deep": "ü"}]})})
        newer.pieces.update(small_trace.pieces)
        for number in range(3):
            newer.rounds.append(
                run_id=0, round=number, seq_id=0, tree_width=number * 7, wait_ms=0.1 + number
            )
        for kind in ("=kv", 'a "b", c', "line\nfeed", ";=1", ""):
            newer.tables["pages"].append(run_id=0, round=1, kind=kind)
        newer.more_facts["later_key"] = {"list": [1.5, None]}
        export_csv(newer, tmp_path / "newer", excel_safe=excel_safe)

    store = open_trace(tmp_path / "newer")
    assert store.unknown_columns() == {
        "rounds": ("tree_width", "wait_ms"),
        "pages": ("run_id", "round", "kind"),
    }
    assert store.rounds.texts("tree_width") == ["0", "7", "14"]
    export_csv(store, tmp_path / "again", excel_safe=excel_safe)
    theirs, ours = (columns_of(tmp_path / name, "rounds") for name in ("newer", "again"))
    assert theirs == ours
    assert list(ours)[-2:] == ["tree_width", "wait_ms"]
    pages = [(tmp_path / name / "pages.csv").read_bytes() for name in ("newer", "again")]
    assert pages[0] == pages[1]
    session = session_of(tmp_path / "again")
    assert session["later_key"] == {"list": [1.5, None]}
    assert session["unknown_columns"] == {
        "rounds": ["tree_width", "wait_ms"],
        "pages": ["run_id", "round", "kind"],
    }
    assert session["columns"]["rounds"]["tree_width"] == TREE.about  # type: ignore[index]
    assert session["rows"]["pages"] == 5  # type: ignore[index]
    assert open_trace(tmp_path / "again").runs[0]["later_fact"] == [1, {"deep": "ü"}]


def test_an_export_with_unknown_tables_may_be_replaced(
    small_trace: TraceStore, tmp_path: Path
) -> None:
    with one_version_later():
        export_csv(TraceStore(), tmp_path / "out")
    assert (tmp_path / "out" / "pages.csv").is_file()
    export_csv(small_trace, tmp_path / "out")
    assert not (tmp_path / "out" / "pages.csv").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 1, None, "3", True, 3.5])
def test_another_major_version_is_refused_in_a_sentence(
    small_trace: TraceStore, tmp_path: Path, version: object
) -> None:
    export_csv(small_trace, tmp_path / "out")
    path = tmp_path / "out" / SESSION_FILE
    path.write_text(json.dumps(session_of(tmp_path / "out") | {"schema_version": version}))
    with pytest.raises(
        TraceFileError, match=f"reads 3 and {SCHEMA_VERSION}. Open it with the version"
    ):
        open_trace(tmp_path / "out")


def test_a_column_that_its_version_has_may_not_be_missing(
    small_trace: TraceStore, tmp_path: Path
) -> None:
    export_csv(small_trace, tmp_path / "out")
    path = tmp_path / "out" / "memory.csv"
    path.write_text(path.read_text().replace(",age", ",old_age"))
    with pytest.raises(TraceFileError, match=r"memory\.csv line 1: column age is missing"):
        open_trace(tmp_path / "out")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("run_id,round,seq_id,slot,state,age,age", "no header row with a name per column"),
        ("", "no header row"),
        ("run_id,round,seq_id,slot,state,age," + ",".join(f"x{i}" for i in range(2000)), "beyond"),
    ],
)
def test_headers_that_say_nothing_are_refused(
    small_trace: TraceStore, tmp_path: Path, header: str, message: str
) -> None:
    export_csv(small_trace, tmp_path / "out")
    (tmp_path / "out" / "memory.csv").write_text(header + "\n")
    with pytest.raises(TraceFileError, match=message):
        open_trace(tmp_path / "out")


@pytest.mark.parametrize("name", ["../rounds", "Rounds", "a b", "x" * 65, ""])
def test_names_of_tables_are_no_paths(small_trace: TraceStore, tmp_path: Path, name: str) -> None:
    export_csv(small_trace, tmp_path / "out")
    path = tmp_path / "out" / SESSION_FILE
    session = session_of(tmp_path / "out")
    session["rows"][name] = 0  # type: ignore[index]
    path.write_text(json.dumps(session))
    with pytest.raises(TraceFileError, match="is not a name of a table"):
        open_trace(tmp_path / "out")


def test_every_column_that_joined_later_names_its_version() -> None:
    for table, columns in records.TABLES.items():
        assert max(column.since for column in columns) <= SCHEMA_MINOR, table
