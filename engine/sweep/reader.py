"""Reading the results file of a sweep, from whoever it comes.

It may be one that a sweep is writing at this moment: rows are read as they are now.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from engine.errors import TraceFileError
from engine.sweep import schema
from engine.sweep.results import MOST_ROWS, ROW_COLUMNS, SweepResults, checked_text, results_of
from engine.sweep.schema import FIGURES, not_ours, results_file

_MOST_BYTES = 1 << 30
_LONGEST_TEXT = 1 << 20


def find_results(path: Path) -> Path | None:
    """The results file that a path means: the file itself or the one in a folder; None for any
    other path. Looks at the first bytes only."""
    file = results_file(path)
    try:
        if not file.is_file():  # a pipe would be waited for
            return None
        with file.open("rb") as opened:
            head = opened.read(72)
    except OSError:
        return None
    is_ours = head[:15] == b"SQLite format 3" and head[68:72] == schema.APPLICATION_ID.to_bytes(4)
    return file if is_ours else None


def read_results(path: Path) -> SweepResults:
    """Read the results of a sweep, from its folder or the file in it.

    Raises TraceFileError, in one sentence, for a file that cannot be read, is something else or
    holds what a sweep does not write.
    """
    file = results_file(Path(path))
    try:
        if not file.is_file():
            raise TraceFileError(f"{file} is no file.", "Name the folder of a sweep's results.")
        if file.stat().st_size > _MOST_BYTES:
            raise TraceFileError(f"{file} is larger than 1 GiB.", "Split the sweep.")
    except OSError as error:
        raise _unreadable(file, error.strerror or str(error)) from error
    if find_results(file) is None:
        raise not_ours(file)
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as opened:
            return _read(file, opened)
    except sqlite3.DatabaseError as error:
        raise _unreadable(file, str(error)) from error
    except UnicodeDecodeError as error:
        raise _unreadable(file, "a text is not UTF-8") from error


def check_tables(path: Path, opened: sqlite3.Connection) -> None:
    """Raises TraceFileError unless the database is of this version and has our tables alone."""
    (version,) = opened.execute("PRAGMA user_version").fetchone()
    if version != schema.VERSION:
        raise TraceFileError(
            f"{path} has version {version}, this program reads {schema.VERSION}.",
            "Open it with the version of Draftscope that wrote it.",
        )
    found = dict(opened.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))
    if found != schema.TABLES:
        raise not_ours(path)


def _read(path: Path, opened: sqlite3.Connection) -> SweepResults:
    opened.execute("PRAGMA trusted_schema = OFF")
    opened.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_TEXT)
    opened.execute("BEGIN")  # everything below is of one moment
    check_tables(path, opened)
    facts = dict(opened.execute("SELECT name, value FROM facts LIMIT 100"))
    columns = ", ".join((*ROW_COLUMNS, *FIGURES))
    rows = opened.execute(
        f"SELECT {columns} FROM results ORDER BY number, key LIMIT {MOST_ROWS + 1}"
    ).fetchall()
    described = opened.execute(f"SELECT id, text FROM descriptions LIMIT {MOST_ROWS}")
    descriptions = {number: checked_text(path, "text", text) for number, text in described}
    planned = _planned(facts.get("planned"))
    return results_of(path, facts.get("title", ""), planned, rows, descriptions)


def _planned(value: Any) -> int:
    is_count = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 8
    return int(value) if is_count else 0


def _unreadable(path: Path, reason: str) -> TraceFileError:
    return TraceFileError(f"{path} cannot be read: {reason}.", "Check the file and its rights.")
