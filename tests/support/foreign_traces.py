"""A small trace of real runs, and what may be wrong with one that comes from anywhere."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.compare.comparison import Comparison
from engine.errors import TraceFileError
from engine.trace.export import SESSION_FILE, TOKEN_COLUMNS, csv_names, export_csv
from engine.trace.records import TABLES, Column
from engine.trace.reopen import open_trace
from engine.trace.session_file import read_session
from engine.trace.store import TraceStore
from tests.support.comparisons import finish, specs
from tests.support.golden_runs import options_of, prompt_of, session

MODEL = "qwen35-c-v2x-mtp-f32"
Rows = list[list[str]]
"""Of a CSV file, the header row first."""


def export_real_trace(folder: Path) -> TraceStore:
    """A run of two sequences and a comparison of two lanes with the reference; every table has
    rows. Returns what was exported."""
    opened, store = session(MODEL), TraceStore()
    run = opened.start(
        [prompt_of(MODEL)] * 2, options_of(6, "draft-mtp", "ngram-simple", parallel=2), store
    )
    while run.step():
        pass
    options = options_of(6, "draft-mtp")
    finish(Comparison(opened, prompt_of(MODEL), options, specs("planes"), store))
    store.findings.append(
        run_id=0, round=1, seq_id=0, rule="r", severity="info", message="m", evidence="e"
    )
    assert all(len(store.tables[name]) for name in TABLES)
    export_csv(store, folder)
    return store


def opened(folder: Path) -> TraceStore | TraceFileError:
    """What opening a folder comes to."""
    try:
        return open_trace(folder)
    except TraceFileError as error:
        return error


def read_rows(folder: Path, table: str) -> Rows:
    with (folder / f"{table}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def write_rows(folder: Path, table: str, rows: Rows) -> None:
    with (folder / f"{table}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def keep_only(folder: Path, table: str) -> None:
    """Take the rows of all other tables away."""
    path = folder / SESSION_FILE
    session = json.loads(path.read_text(encoding="utf-8"))
    for other in set(TABLES) - {table}:
        write_rows(folder, other, read_rows(folder, other)[:1])
        session["rows"][other] = 0
    path.write_text(json.dumps(session), encoding="utf-8")


def columns() -> Iterator[tuple[str, Column, str]]:
    """Every column of the CSV files, one of those that are alike but for their rank: its table,
    its record and its name there."""
    for table, records in TABLES.items():
        for column in records:
            names = csv_names(table, column)
            for name in names[:1] if column.kind == "tops" else names:
                yield table, Column(name, "text", "") if name in TOKEN_COLUMNS else column, name


DAMAGES = (
    "empty",
    "all empty",
    "zero",
    "negative",
    "largest",
    "beyond the largest",
    "beyond all integers",
    "infinite",
    "not a number",
    "a word",
    "a long text",
    "in reverse",
)


def damaged(rows: Rows, name: str, column: Column, damage: str) -> Rows:
    """The rows with one column damaged, in the middle of the file or as a whole."""
    at, middle = rows[0].index(name), 1 + len(rows[1:]) // 2
    row = len(rows) - 1 if damage == "largest" else middle  # rounds go up
    values = [row[at] for row in rows]
    if damage == "in reverse":
        values[1:] = values[:0:-1]
    elif damage == "all empty":
        values[1:] = [""] * len(rows[1:])
    else:
        most = min(column.most, 2**31 - 1) if column.most == math.inf else column.most
        values[row] = {
            "empty": "",
            "zero": "0",
            "negative": "-3",
            "largest": f"{most:.10g}" if most % 1 else str(int(most)),
            "beyond the largest": str(int(most) + 1),
            "beyond all integers": "9" * 30,
            "infinite": "inf",
            "not a number": "nan",
            "a word": 'x;"y',
            "a long text": "long " * 12_000,
        }[damage]
    return [
        [*fields[:at], value, *fields[at + 1 :]] for fields, value in zip(rows, values, strict=True)
    ]


JUNK = (None, "x", "long " * 12_000, -1, 10**30, 1e300, True, [], ["x"], {}, {"x": [1]})
"""What may stand in session.json in place of anything."""


def facts(session: dict[str, Any]) -> list[tuple[str, ...]]:
    """The places of everything that session.json says of its first and its last run."""
    found: list[tuple[str, ...]] = []

    def walk(place: tuple[str, ...], value: Any) -> None:
        found.append(place)
        for key, inner in value.items() if isinstance(value, dict) else ():
            walk((*place, key), inner)

    runs = session["runs"]
    for run_id in ("0", str(len(runs) - 1)):
        for key, value in runs[run_id].items():
            walk(("runs", run_id, key), value)
    return found


def without_tables(session: dict[str, Any]) -> dict[str, Any]:
    """What session.json says of its runs, and little else."""
    return session | {"pieces": {}, "columns": {}}


def is_refused(folder: Path, session: dict[str, Any]) -> str:
    """What is said of a session.json written into a folder, empty if it is taken."""
    path = folder / SESSION_FILE
    path.write_text(json.dumps(session), encoding="utf-8")
    try:
        read_session(path)
    except TraceFileError as error:
        return str(error)
    return ""


def replaced(session: dict[str, Any], place: tuple[str, ...], junk: Any) -> dict[str, Any]:
    """session.json with something else at a place, if the place is still there."""
    changed = dict(session)
    at = changed
    for key in place[:-1]:
        if not isinstance(at.get(key), dict):
            return session
        at[key] = dict(at[key])
        at = at[key]
    at[place[-1]] = junk
    return changed
