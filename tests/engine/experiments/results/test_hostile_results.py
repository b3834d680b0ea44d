"""Results files made to mislead, to hang or to fill the memory: one sentence each."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from engine.errors import TraceFileError
from engine.experiments.results import reader as database
from engine.experiments.results import table as schema
from engine.experiments.results.reader import _TextBudget, find_results, read_results
from engine.experiments.results.table import MOST_ROWS, trace_folder
from tests.support.sweeps import write_results


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_results(tmp_path_factory.mktemp("sweep"), 2, 3)


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(written, tmp_path / schema.RESULTS_FILE))


def refusal(path: Path) -> str:
    """The sentences about a file, which name it in one line."""
    with pytest.raises(TraceFileError) as caught:
        read_results(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and text.isprintable() and caught.value.remedy
    return caught.value.message


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("PRAGMA synchronous = OFF")  # thousands of statements would wait for the disk
        for statement in statements:
            file.execute(statement)


ENDLESS = (
    "CREATE VIEW results AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) "
    "SELECT i FROM n"
)


@pytest.mark.parametrize(
    "statements",
    [
        ("DROP TABLE results", ENDLESS),
        ("CREATE TRIGGER t AFTER INSERT ON results BEGIN SELECT 1; END",),
        ("ALTER TABLE results RENAME TO other",),
        ("CREATE VIRTUAL TABLE more USING fts4(a)",),
        tuple(f"CREATE TABLE t{i} (a)" for i in range(2000)),
    ],
)
def test_other_tables_views_and_triggers_are_not_read(
    copied: Path, statements: tuple[str, ...]
) -> None:
    change(copied, *statements)
    assert "is not a result file" in refusal(copied)


@pytest.mark.parametrize(
    "statement",
    [
        # what a table's text says is not what SQLite would do with it
        f"INSERT INTO sqlite_master VALUES ('view', 'results', 'results', 0, '{ENDLESS}')",
        "UPDATE sqlite_master SET rootpage = 1 WHERE name = 'results'",
        "UPDATE sqlite_master SET rootpage = 9999 WHERE name = 'results'",
        "UPDATE sqlite_master SET sql = x'ff' WHERE name = 'facts'",
        "UPDATE sqlite_master SET name = NULL WHERE name = 'facts'",
    ],
)
def test_a_changed_schema_is_refused(copied: Path, statement: str) -> None:
    change(copied, "PRAGMA writable_schema = ON", statement)
    refusal(copied)


def test_more_rows_than_any_sweep_has_are_counted_not_read(copied: Path) -> None:
    change(
        copied,
        "DELETE FROM results",
        f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {MOST_ROWS + 1}) "
        "INSERT INTO results (key) SELECT printf('%016x', i) FROM n",
    )
    assert "has more than 100,000 rows" in refusal(copied)


def test_a_file_is_no_larger_than_its_texts(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(100))
    budget = _TextBudget(path)
    budget.add("a" * 60, "b" * 40)
    with pytest.raises(TraceFileError, match="several rows share a text"):
        budget.add("c")


def test_a_file_that_is_too_large_is_not_opened(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "MOST_BYTES", 1 << 10)
    assert "has more than 1,024 bytes" in refusal(copied)


def test_what_takes_too_long_is_given_up(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_MOST_S", -1.0)
    monkeypatch.setattr(database, "_LOOK_EVERY", 1)
    assert "takes longer than" in refusal(copied)


def test_a_locked_file_is_waited_for_a_little(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_LOCK_S", 0.1)
    with closing(sqlite3.connect(copied, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert "is locked by another program" in refusal(copied)
    assert read_results(copied).n == 6


def test_a_write_ahead_log_is_not_followed(copied: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(copied)) as file:
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("UPDATE results SET number = number + 1")
        file.commit()
        left = Path(shutil.copytree(copied.parent, tmp_path / "left")) / copied.name
    assert "left/results.sqlite has a write-ahead log (results.sqlite-wal" in refusal(left)
    for log in left.parent.glob("*-wal"), left.parent.glob("*-shm"):
        next(log).unlink()
    assert "has a write-ahead log, which sweeps" in refusal(left)


@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
def test_a_pipe_beside_the_file_is_not_waited_for(copied: Path, end: str) -> None:
    os.mkfifo(f"{copied}{end}")
    refusal(copied)


def test_a_write_that_was_cut_off_is_told(copied: Path) -> None:
    program = (
        "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1]); "
        "c.execute('PRAGMA cache_size = 1'); c.execute('UPDATE results SET error = hex(zeroblob("
        "20000))'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, str(copied)], check=True)
    assert Path(f"{copied}-journal").stat().st_size
    assert "was left in the middle of a write" in refusal(copied)


def test_a_folder_that_cannot_be_written_is_read(copied: Path) -> None:
    copied.chmod(0o444)
    copied.parent.chmod(0o555)
    try:
        before = sorted(copied.parent.iterdir())
        assert read_results(copied.parent).n == 6
        assert sorted(copied.parent.iterdir()) == before
    finally:
        copied.parent.chmod(0o755)


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0", b"PK" + bytes(200), b"\x02" * 200])
def test_what_is_no_database_is_no_result_file(copied: Path, content: bytes) -> None:
    copied.write_bytes(content)
    assert "is not a result file" in refusal(copied)
    assert find_results(copied) is None


def test_a_trace_is_looked_for_beside_the_file_alone(copied: Path, tmp_path: Path) -> None:
    change(copied, "UPDATE results SET has_trace = 1")
    results = read_results(copied)
    assert results.trace(0) is None  # missing
    places = [trace_folder(copied, key) for key in results.columns["key"]]
    places[0].mkdir(parents=True)
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    places[1].symlink_to(elsewhere)
    places[2].symlink_to("/dev")
    places[3].symlink_to(places[3])
    places[4].symlink_to(places[0])
    assert [results.trace(row) for row in range(5)] == [places[0], None, None, None, places[4]]
