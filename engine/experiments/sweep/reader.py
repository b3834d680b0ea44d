"""Reading the results file of a sweep, from whoever it comes.

It may be one that a sweep is writing at this moment: rows are read as they are now.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.errors import TraceFileError
from engine.experiments.sweep import schema
from engine.experiments.sweep.foreign_database import LONGEST_TEXT, opened_for_reading
from engine.experiments.sweep.results import SweepResults, results_of
from engine.experiments.sweep.row_check import (
    MOST_ROWS,
    NUMBER_AT,
    ROW_COLUMNS,
    TEXT_COLUMNS,
    check_row,
    checked_text,
    too_many_rows,
    wrong,
)
from engine.experiments.sweep.schema import FIGURES, not_ours, results_file
from engine.files import file_head

_LEAST_ROWID = -(2**63)


def find_results(path: Path) -> Path | None:
    """The results file that a path means: the file itself or the one in a folder; None for any
    other path. Looks at the first bytes only."""
    file = results_file(path)
    head = file_head(file, 72)
    is_ours = head[:15] == b"SQLite format 3" and head[68:72] == schema.APPLICATION_ID.to_bytes(4)
    return file if is_ours else None


def read_results(path: Path) -> SweepResults:
    """Read the results of a sweep, from its folder or the file in it.

    Raises TraceFileError, in one sentence, for a file that cannot be read, is something else or
    holds what a sweep does not write.
    """
    file = results_file(Path(path))
    if file.is_file() and find_results(file) is None:
        raise not_ours(file)
    with opened_for_reading(file) as opened:
        check_tables(file, opened)
        return _read(file, opened)


def check_tables(path: Path, opened: sqlite3.Connection) -> None:
    """Raises TraceFileError unless the database is of this version and has our tables alone."""
    (version,) = opened.execute("PRAGMA user_version").fetchone()
    if version != schema.VERSION:
        raise TraceFileError(
            f"{path} has version {version}, this program reads {schema.VERSION}.",
            "Open it with the version of Draftscope that wrote it.",
        )
    # a name twice, or one more, is not ours either
    found = opened.execute(
        "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT ?",
        (len(schema.TABLES) + 1,),
    ).fetchall()
    if len(found) != len(schema.TABLES) or dict(found) != schema.TABLES:
        raise not_ours(path)


def _read(path: Path, opened: sqlite3.Connection) -> SweepResults:
    head = {name: value for _, name, value in _rows(path, opened, "facts", ("name", "value"))}
    described, texts = {}, _TextBudget(path)
    for at, number, text in _rows(path, opened, "descriptions", ("id", "text")):
        described[number] = checked_text(path, "a description", text, at)
        texts.add(text)
    rows, places = [], []
    for at, *row in _rows(path, opened, "results", (*ROW_COLUMNS, *FIGURES)):
        check_row(path, at, row)
        texts.add(*row[: len(TEXT_COLUMNS)], row[ROW_COLUMNS.index("settings")])
        rows.append(row)
        places.append(at)
    order = sorted(range(len(rows)), key=lambda i: (rows[i][NUMBER_AT], rows[i][0]))
    return results_of(
        path,
        head.get("title", ""),
        _planned(head.get("planned")),
        [rows[i] for i in order],
        described,
        [places[i] for i in order],
    )


def _rows(
    path: Path, opened: sqlite3.Connection, table: str, columns: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    """Each row's number (SQLite's rowid) and values, as the file has them one behind another.
    Raises TraceFileError that names the row for what cannot be read."""
    ((n,),) = opened.execute(f"SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT {MOST_ROWS + 1})")
    if n > MOST_ROWS:
        raise too_many_rows(path)
    select, last = f"SELECT rowid, {', '.join(columns)} FROM {table}", _LEAST_ROWID
    try:
        for row in opened.execute(f"{select} ORDER BY rowid"):
            yield row
            last = row[0]
    except (UnicodeDecodeError, sqlite3.DataError) as error:
        at = _wrong_row(opened, table, select, last)
        is_long = isinstance(error, sqlite3.DataError)
        what = f"is longer than {LONGEST_TEXT >> 20} MiB" if is_long else "is not UTF-8"
        raise wrong(path, at, f"a text of table {table}", what) from error


def _wrong_row(opened: sqlite3.Connection, table: str, select: str, last: int) -> int:
    """Which row cannot be read: some versions of Python are a row ahead of what they give."""
    near = opened.execute(
        f"SELECT rowid FROM {table} WHERE rowid > ? ORDER BY rowid LIMIT 3", (last,)
    )
    for (at,) in near.fetchall():
        try:
            opened.execute(f"{select} WHERE rowid = ?", (at,)).fetchone()
        except (UnicodeDecodeError, sqlite3.DataError):
            return int(at)
    return last


class _TextBudget:
    """Counts text: more than the file has bytes is the same bytes again and again."""

    def __init__(self, path: Path) -> None:
        self._path, self._left = path, path.stat().st_size

    def add(self, *texts: str) -> None:
        self._left -= sum(map(len, texts))
        if self._left < 0:
            raise TraceFileError(
                f"{self._path} is damaged (several rows share a text).", "Run the sweep again."
            )


def _planned(value: Any) -> int:
    is_count = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 8
    return int(value) if is_count else 0
