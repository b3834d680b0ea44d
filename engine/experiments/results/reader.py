"""Reading a results file, which may come from anyone.

It may be one that is being written at this moment: rows are read as they are now.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.errors import TraceFileError
from engine.experiments.results import schema
from engine.experiments.results.database import LONGEST_TEXT, opened_for_reading
from engine.experiments.results.json_files import is_results_json, read_results_json
from engine.experiments.results.row_check import (
    MOST_ROWS,
    NUMBER_AT,
    ROW_COLUMNS,
    TEXT_COLUMNS,
    check_row,
    checked_text,
    too_many_rows,
    wrong,
)
from engine.experiments.results.schema import FIGURES, not_ours, results_file
from engine.experiments.results.table import ExperimentResults, results_of
from engine.files import file_head

_LEAST_ROWID = -(2**63)


def find_results(path: Path) -> Path | None:
    """The results file that a path means: the file itself, also as JSON, or the one in a folder;
    None for any other path. Looks at the first bytes only."""
    file = results_file(path)
    return file if is_database(file) or is_results_json(file) else None


def is_database(path: Path) -> bool:
    """Whether a path is a results file that rows can be added to. Looks at the first bytes only."""
    head = file_head(path, 72)
    return head[:15] == b"SQLite format 3" and head[68:72] == schema.APPLICATION_ID.to_bytes(4)


def read_results(path: Path) -> ExperimentResults:
    """Read results, from their folder, the file in it or JSON.

    Raises TraceFileError, in one sentence, for a file that cannot be read, is something else or
    holds what is not written there.
    """
    file = results_file(Path(path))
    if file.suffix.lower() == ".json" or is_results_json(file):
        return read_results_json(file)
    if file.is_file() and not is_database(file):
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


def _read(path: Path, opened: sqlite3.Connection) -> ExperimentResults:
    facts, described, texts = {}, {}, _TextBudget(path)
    for _, name, value in _rows(path, opened, "facts", ("name", "value")):
        facts[name] = value
        texts.add(*(text for text in (name, value) if isinstance(text, str)))
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
        {name: value for name, value in facts.items() if name == "title" or _is_text(name, value)},
        _planned(facts.get("planned")),
        [rows[i] for i in order],
        described,
        [places[i] for i in order],
    )


def _rows(
    path: Path, opened: sqlite3.Connection, table: str, columns: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    """Each row's number (SQLite's rowid) and values, in the order of the file.
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
                f"{self._path} is damaged (several rows share a text).", "Measure again."
            )


def _is_text(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _planned(value: Any) -> int:
    is_count = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 8
    return int(value) if is_count else 0
