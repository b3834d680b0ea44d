"""Changes of an exported trace, each drawn as JSON and applied to its folder."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.trace.export import SESSION_FILE, csv_names
from engine.trace.records import READ_VERSIONS, SCHEMA_MINOR, TABLES
from engine.trace.store import TraceStore
from tests.support.foreign_traces import (
    DAMAGES,
    JUNK,
    Rows,
    columns,
    damaged,
    export_real_trace,
    facts,
    read_rows,
    replaced,
    write_rows,
)

Step = dict[str, Any]
Random = np.random.Generator
_FILES = ("gone", "empty", "cut", "bytes", "folder", "link", "long line", "no header", "bom")
_ROWS = ("fewer", "turned", "none", "each again", "thousands", "mixed", "wide")
_GENTLE_ROWS = ("fewer", "each again", "thousands", "mixed")
_ANY, _GENTLE = [0.3, 0.2, 0.2, 0.14, 0.06, 0.1], [0.0, 0.6, 0.0, 0.2, 0.0, 0.2]
"""How often the entries of _DRAWN are drawn, in order."""
_VERSIONS = (0, 1, 2, 99, -1, "4", None, 4.5)
_TEXTS = ("", "x", "draft-mtp", "a b", "é\u202e", "=1+1", "\u2603" * 99, "x" * 3000)
_NEEDED = ("run_id", "round", "token_id", "token_hex", "token_text")
"""Other values in these contradict other rows, or session.json."""


def real_trace() -> Path:
    return _real()[0]


def real_store() -> TraceStore:
    """What it was exported from."""
    return _real()[1]


@cache
def _real() -> tuple[Path, TraceStore]:
    folder = Path(tempfile.mkdtemp(prefix="draftscope-torture-trace-")) / "trace"
    return folder, export_real_trace(folder)


@cache
def _columns() -> dict[str, tuple[str, Any]]:
    """Table and record of every column, by "table.name"."""
    return {f"{table}.{name}": (table, column) for table, column, name in columns()}


@cache
def _facts() -> list[tuple[str, ...]]:
    session = json.loads((real_trace() / SESSION_FILE).read_text())
    return [(key,) for key in session] + facts(session)


def draw(random: Random, *, gently: bool) -> Step:
    """A step for any trace of this program. gently: such as leave a trace that can be read."""
    do = str(random.choice(list(_DRAWN), p=_GENTLE if gently else _ANY))
    step = {"do": do, "at": int(random.integers(1 << 16)), **_DRAWN[do](random)}
    if gently and do == "rows":
        step |= {"how": _pick(random, _GENTLE_ROWS), "told": True}
    if gently and step.get("how") == "none":
        step |= {"how": "later", "version": READ_VERSIONS[-1], "minor": SCHEMA_MINOR + 1}
    return step


def _pick(random: Random, items: Any) -> Any:
    return items[int(random.integers(len(items)))]


def _column(random: Random) -> Step:
    return {"column": _pick(random, list(_columns())), "how": _pick(random, DAMAGES)}


def _values(random: Random) -> Step:
    """Other values that a column may have."""
    free = [name for name in _columns() if name.partition(".")[2] not in _NEEDED]
    return {
        "column": _pick(random, free),
        "share": _pick(random, (0.02, 0.3, 1.0)),
        "seed": int(random.integers(1 << 31)),
    }


def _fact(random: Random) -> Step:
    place = ".".join(_pick(random, _facts()))
    return {"place": place, "junk": int(random.integers(len(JUNK)))}


def _rows(random: Random) -> Step:
    """reported: whether session.json tells the new number of rows."""
    table, told = _pick(random, list(TABLES)), bool(random.random() < 0.8)
    return {"table": table, "how": _pick(random, _ROWS), "told": told}


def _file(random: Random) -> Step:
    name = _pick(random, [SESSION_FILE, *(f"{table}.csv" for table in TABLES)])
    return {"name": name, "how": _pick(random, _FILES)}


def _schema(random: Random) -> Step:
    """Of an earlier minor version, a later one with what no one knows yet, or none at all."""
    how = _pick(random, ("earlier", "earlier", "later", "later", "none"))
    if how == "none":
        return {"how": how, "version": _pick(random, _VERSIONS), "minor": _pick(random, _VERSIONS)}
    later = SCHEMA_MINOR + 1 + int(random.integers(9))
    minor = int(random.integers(SCHEMA_MINOR)) if how == "earlier" else later
    return {"how": how, "version": _pick(random, READ_VERSIONS), "minor": minor}


_DRAWN: dict[str, Callable[[Random], Step]] = {
    "column": _column,
    "values": _values,
    "fact": _fact,
    "rows": _rows,
    "file": _file,
    "schema": _schema,
}


def apply(step: Step, folder: Path) -> None:
    """An earlier step may have taken away what this one would change."""
    with contextlib.suppress(OSError, ValueError, LookupError, csv.Error):
        _APPLIED[step["do"]](step, folder)


def _apply_column(step: Step, folder: Path) -> None:
    table, column = _columns()[step["column"]]
    name = step["column"].partition(".")[2]
    write_rows(folder, table, damaged(read_rows(folder, table), name, column, step["how"]))


def _apply_values(step: Step, folder: Path) -> None:
    table, column = _columns()[step["column"]]
    rows, random = read_rows(folder, table), np.random.default_rng(step["seed"])
    at = rows[0].index(step["column"].partition(".")[2])
    for row in rows[1:]:
        if random.random() < step["share"]:
            row[at] = _valid(column, random)
    write_rows(folder, table, rows)


def _valid(column: Any, random: Random) -> str:
    if not column.required and random.random() < 0.1:
        return ""
    if column.kind == "text":
        return str(_pick(random, column.choices or _TEXTS))
    low, high = (max(-1e12, column.least), min(1e12, column.most))
    edges = [low, high, low + (high - low) * random.random() ** 8, 0.0, 1.0]
    value = min(max(float(_pick(random, edges)), low), high)
    whole = column.kind == "int" or (column.kind == "tops" and column.is_whole)
    return str(int(np.clip(value, -(2**31) + 1, 2**31 - 1))) if whole else repr(value)


def _apply_fact(step: Step, folder: Path) -> None:
    place = tuple(step["place"].split("."))
    _change_session(folder, lambda session: replaced(session, place, JUNK[step["junk"]]))


def _apply_rows(step: Step, folder: Path) -> None:
    table = step["table"]
    rows = _changed_rows(read_rows(folder, table), step)
    write_rows(folder, table, rows)
    if step["told"]:
        _change_session(folder, lambda found: _telling(found, {table: len(rows) - 1}))


def _changed_rows(rows: Rows, step: Step) -> Rows:
    head, body, at = rows[0], rows[1:], step["at"] % max(1, len(rows) - 1)
    times = 20_000 // max(1, len(body))
    mixed = np.random.default_rng(step["at"]).permutation(len(body)).tolist()
    return [
        head,
        *{
            "fewer": lambda: body[:at],
            "turned": lambda: body[::-1],
            "none": list,
            "each again": lambda: [row for row in body for _ in range(2)],
            "thousands": lambda: [row for row in body for _ in range(times)],
            "mixed": lambda: sorted((body[i] for i in mixed), key=_round_of(head)),
            "wide": lambda: [row + ["1"] * (i == at) for i, row in enumerate(body)],
        }[step["how"]](),
    ]


def _round_of(head: list[str]) -> Callable[[list[str]], float]:
    """By round alone: rows of one may come in any order."""
    at = head.index("round")
    return lambda row: float(row[at]) if row[at] else -math.inf


def _apply_file(step: Step, folder: Path) -> None:
    path, how = folder / step["name"], step["how"]
    data = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to(path)
    elif how != "gone":
        at = step["at"] % max(1, len(data))
        path.write_bytes(
            {
                "empty": lambda: b"",
                "cut": lambda: data[:at],
                "bytes": lambda: data[:at] + bytes([step["at"] % 256]) + data[at + 1 :],
                "long line": lambda: data[:at] + b"x" * (1 << 21) + data[at:],
                "no header": lambda: data.partition(b"\n")[2],
                "bom": lambda: b"\xef\xbb\xbf" + data,
            }[how]()
        )


def _apply_schema(step: Step, folder: Path) -> None:
    versions = {"schema_version": step["version"], "schema_minor": step["minor"]}
    _change_session(folder, lambda session: session | versions)
    if step["how"] == "earlier":
        for table, records in TABLES.items():
            later = {
                name
                for column in records
                if column.since > step["minor"]
                for name in csv_names(table, column)
            }
            rows = read_rows(folder, table)
            kept = [i for i, name in enumerate(rows[0]) if name not in later]
            write_rows(folder, table, [[row[i] for i in kept] for row in rows])
    elif step["how"] == "later":
        for table in TABLES:
            head, *body = read_rows(folder, table)
            write_rows(folder, table, [[*head, "moon"], *([*row, "full"] for row in body)])
        write_rows(folder, "moons", [["run_id", "phase"], ["0", "x"], ["0", ""]])
        news = {"moon": [1, {"a": None}], "columns": {"tokens": {"moon": "phase of it"}}}
        _change_session(folder, lambda found: _telling(found | news, {"moons": 2}))


def _telling(found: dict[str, Any], rows: dict[str, int]) -> dict[str, Any]:
    """A session with these counts of rows, unless a step before has put something else there."""
    counts = found["rows"]
    return found | {"rows": counts | rows} if isinstance(counts, dict) else found


def _change_session(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / SESSION_FILE
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


_APPLIED: dict[str, Callable[[Step, Path], None]] = {
    "column": _apply_column,
    "values": _apply_values,
    "fact": _apply_fact,
    "rows": _apply_rows,
    "file": _apply_file,
    "schema": _apply_schema,
}
