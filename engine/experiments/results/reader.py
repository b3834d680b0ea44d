"""Reading a results file, which may come from anyone.

It may be one that is being written at this moment: rows are read as they are now. The SQLite file
is opened so that reading it ends and stays small: nothing next to it is read but a journal, which
SQLite only looks at here; no text is longer than 1 MiB; and what takes longer than some seconds is
given up.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import thread_time
from typing import Any

from engine.errors import TraceFileError
from engine.experiments.results.json_files import is_results_json, read_results_json
from engine.experiments.results.table import (
    APPLICATION_ID,
    FIGURES,
    MOST_ROWS,
    NUMBER_AT,
    ROW_COLUMNS,
    TABLES,
    TEXT_COLUMNS,
    VERSION,
    ExperimentResults,
    check_row,
    checked_text,
    not_ours,
    results_file,
    results_of,
    too_many_rows,
    wrong,
)
from engine.files import file_head, opened_file
from engine.gguf.binary import shorten

_LEAST_ROWID = -(2**63)


def find_results(path: Path) -> Path | None:
    """The results file that a path means: the file itself, also as JSON, or the one in a folder;
    None for any other path. Looks at the first bytes only."""
    file = results_file(path)
    return file if is_database(file) or is_results_json(file) else None


def is_database(path: Path) -> bool:
    """Whether a path is a results file that rows can be added to. Looks at the first bytes only."""
    head = file_head(path, 72)
    return head[:15] == b"SQLite format 3" and head[68:72] == APPLICATION_ID.to_bytes(4)


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
    if version != VERSION:
        raise TraceFileError(
            f"{path} has version {version}, this program reads {VERSION}.",
            "Open it with the version of Draftscope that wrote it.",
        )
    # a name twice, or one more, is not ours either
    found = opened.execute(
        "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT ?", (len(TABLES) + 1,)
    ).fetchall()
    if len(found) != len(TABLES) or dict(found) != TABLES:
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


MOST_BYTES = 128 << 20
LONGEST_TEXT = 1 << 20
_MOST_S = 20.0
"""Of processor time."""
_LOCK_S = 3.0
_LOOK_EVERY = 10_000
"""Steps of SQLite's machine after which the time is looked at."""
_VERSIONS = slice(18, 20)
"""Where a file says whether it is written ahead to a log."""
_AGAIN = "Measure again, or name another file."


@contextmanager
def opened_for_reading(path: Path) -> Iterator[sqlite3.Connection]:
    """The file as it is at one moment, which begins with the first question.

    Raises TraceFileError for one that is too large or too slow to read, locked, damaged, or has
    files next to it that no writer leaves; also where reading it in the body does.
    """
    try:
        _check_files(path)
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=_LOCK_S)) as opened:
            _limit(opened)
            opened.execute("BEGIN")
            yield opened
    except OSError as error:
        raise TraceFileError(
            f"{path} cannot be read: {error.strerror or error}.", "Check the file and its rights."
        ) from error
    except UnicodeDecodeError as error:
        raise TraceFileError(f"{path} is damaged (a text is not UTF-8).", _AGAIN) from error
    except sqlite3.Error as error:
        raise _explained(path, error) from error


def _limit(opened: sqlite3.Connection) -> None:
    opened.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_TEXT)
    opened.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    opened.text_factory = bytes.decode  # the error names no text then
    end = thread_time() + _MOST_S  # a slow disk, or a machine that sleeps, is not its fault
    opened.set_progress_handler(lambda: thread_time() > end, _LOOK_EVERY)
    for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON"):
        opened.execute(f"PRAGMA {pragma}")


def _check_files(path: Path) -> None:
    """Nothing that SQLite would open is anything but a file of a sensible size. Raises OSError."""
    with opened_file(path, TraceFileError) as file:
        head = file.read(100) or b""
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise TraceFileError(
                f"{path} is larger than {MOST_BYTES >> 20} MiB.", "Split the plan."
            )
    logs = [other for end in ("-wal", "-shm") if os.path.lexists(other := f"{path}{end}")]
    if logs or 2 in head[_VERSIONS]:
        beside = f" ({Path(logs[0]).name} lies next to it)" if logs else ""
        raise TraceFileError(
            f"{path} is kept with a write-ahead log{beside}, as no sweep keeps it.",
            f"Put it together with `sqlite3 {path.name} 'PRAGMA journal_mode = delete'`.",
        )
    journal = Path(f"{path}-journal")
    if os.path.lexists(journal) and not journal.is_file():
        raise TraceFileError(f"{journal} is not a file.", "Remove it.")


def _explained(path: Path, error: sqlite3.Error) -> TraceFileError:
    """What went wrong in SQLite, in words."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    said = shorten(str(error), 120)  # it may quote the file
    if code == sqlite3.SQLITE_INTERRUPT:
        return TraceFileError(f"{path} takes longer than {_MOST_S:.0f} s to read.", _AGAIN)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return TraceFileError(
            f"{path} is locked by another program.", "Wait for it, and read the file again."
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
        return TraceFileError(
            f"{path} was left in the middle of a write, or cannot be opened ({said}).",
            "Go on with the sweep that writes it, or check the rights of its folder.",
        )
    return TraceFileError(f"{path} is damaged ({said}).", _AGAIN)
