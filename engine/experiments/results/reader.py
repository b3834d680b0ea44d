"""Reader of a results file, or of the JSON printed by `tune --json` and `bench suite --json`. Both
are untrusted: values are checked, and errors name their place.

The file may be written at the same time: rows are read as they are now. The SQLite file is opened
with limits: of neighbouring files only a journal is read, which SQLite only looks at here; texts
are limited to 1 MiB; and reading stops after some seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import thread_time
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from engine.errors import TraceFileError, check_most
from engine.experiments.results.table import (
    APPLICATION_ID,
    DONE,
    FIGURES,
    MOST_ROWS,
    NUMBER_AT,
    ROW_COLUMNS,
    SUITE,
    TABLES,
    TEXT_COLUMNS,
    TUNE,
    VERSION,
    ExperimentResults,
    check_row,
    checked_text,
    is_figure,
    not_ours,
    results_file,
    results_of,
    wrong,
)
from engine.files import file_head, opened_file, user_text
from engine.foreign import LARGEST, JsonError, parse_json
from engine.gguf.binary import shorten
from engine.trace.typed_json import strictly

KINDS = {"draftscope tune": TUNE, "draftscope bench suite": SUITE}
JSON_VERSION = 1
MEASURED, ESTIMATED = "measured", "estimated"
_MOST_BYTES = 64 << 20
CONFORM = "draftscope conform"
"""Kind of a file for engine.conform.report."""
_BEGIN = re.compile(rb'\s*\{\s*"kind"\s*:\s*"(%s)"' % "|".join((*KINDS, CONFORM)).encode())
_WRITE_AGAIN = "Write it again with --json."
_LONGEST = 200
"""Characters of a name."""

_Figure = Annotated[float, Meta(ge=0, le=LARGEST)]
_Name = Annotated[str, Meta(max_length=_LONGEST)]
_Rows = Meta(max_length=MOST_ROWS)


class _Setting(TypedDict):
    drafter: _Name
    n_max: _Figure
    p_min: _Figure


class _Costs(TypedDict):
    acceptance: NotRequired[_Figure | None]


class _Confirmed(TypedDict):
    tokens_per_second: _Figure
    low: _Figure
    high: _Figure
    undo_bytes: _Figure
    setting: _Setting | None
    costs: _Costs | None


class _Estimated(TypedDict):
    tokens_per_second: _Figure
    acceptance: _Figure | None
    setting: _Setting


class _TuneFile(TypedDict):
    model: dict[str, Any]
    environment: dict[str, Any]
    confirmed: Annotated[list[_Confirmed], _Rows]
    estimates: Annotated[list[_Estimated], _Rows]


class _RequestFigures(TypedDict):
    name: _Name
    predicted_per_second: _Figure
    draft_n: _Figure
    draft_n_accepted: _Figure


class _Configuration(TypedDict):
    name: _Name
    rows: Annotated[list[_RequestFigures], _Rows]


class _SuiteFile(TypedDict):
    model: dict[str, Any]
    environment: dict[str, Any]
    configurations: Annotated[list[_Configuration], _Rows]


Row = tuple[dict[str, Any], dict[str, float | None]]
"""Settings, by their keys in the plan of a sweep, and figures by name of FIGURES."""


def kind_of_json(path: Path) -> str:
    """The kind of a JSON file, empty if unknown. Reads the first bytes only."""
    found = _BEGIN.match(file_head(path, 256))
    return found[1].decode() if found else ""


def read_results_json(path: Path) -> ExperimentResults:
    """Read a file. Raises TraceFileError, in one sentence, if it cannot be read, is something else
    or incomplete."""
    data = _loaded(path)
    kind = KINDS[data["kind"]]

    def wrong(place: str, what: str) -> TraceFileError:
        return TraceFileError(f"{path}: {place} {what}.", _WRITE_AGAIN)

    strictly(_TuneFile if kind == TUNE else _SuiteFile, data, wrong)
    model, environment = data["model"], data["environment"]
    found = tune_rows(data) if kind == TUNE else list(_suite_rows(data, wrong))
    # duplicate settings would be one row of a results file
    rows = {key_of(settings): (settings, figures) for settings, figures in found}
    name = model.get("name")
    return results_of(
        path,
        {"title": title(kind, name if isinstance(name, str) else ""), "kind": kind},
        len(rows),
        [
            [key, DONE, "", "", "", i, json.dumps(settings), 0, 0, 1, *map(figures.get, FIGURES)]
            for i, (key, (settings, figures)) in enumerate(rows.items(), 1)
        ],
        {0: json.dumps(environment), 1: json.dumps(model)},
    )


def title(kind: str, model: str) -> str:
    """Title of results: their kind, and the model's name."""
    return f"{kind}: {model[:_LONGEST]}" if model else kind


def key_of(settings: Mapping[str, Any]) -> str:
    """The key of a row, from its settings."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tune_rows(data: Mapping[str, Any]) -> list[Row]:
    """The rows of what `tune` returns: real runs, and the simulated settings,
    distinguished by the setting `figures`."""
    measured = [
        (
            _tune_settings(one["setting"], MEASURED),
            {
                "predicted_per_second": one["tokens_per_second"],
                "predicted_per_second_low": one["low"],
                "predicted_per_second_high": one["high"],
                "draft_acceptance_rate": (one["costs"] or {}).get("acceptance"),
                "memory_bytes": one["undo_bytes"],
            },
        )
        for one in data["confirmed"]
    ]
    estimated = [
        (
            _tune_settings(one["setting"], ESTIMATED),
            {
                "predicted_per_second": one["tokens_per_second"],
                "draft_acceptance_rate": one["acceptance"],
            },
        )
        for one in data["estimates"]
    ]
    return [*measured, *estimated]


def _tune_settings(setting: Mapping[str, Any] | None, figures: str) -> dict[str, Any]:
    if setting is None:
        return {"figures": figures, "spec-type": "none"}
    return {
        "figures": figures,
        "spec-type": setting["drafter"],
        "spec-draft-n-max": setting["n_max"],
        "spec-draft-p-min": setting["p_min"],
    }


def suite_row(configuration: str, request: Mapping[str, Any]) -> Row:
    """The row of a request. request: fields of engine.experiments.bench.request.RequestResult,
    with the prompt's name under `prompt`."""
    figures = {name: request[name] for name in FIGURES if name in request}
    drafted = request.get("draft_n")
    if drafted:
        figures["draft_acceptance_rate"] = request["draft_n_accepted"] / drafted
    return {"configuration": configuration, "prompt": request["prompt"]}, figures


def _suite_rows(data: dict[str, Any], wrong: Callable[[str, str], TraceFileError]) -> Iterator[Row]:
    for i, one in enumerate(data["configurations"]):
        for j, row in enumerate(one["rows"]):
            for name in FIGURES:
                if row.get(name) is not None and not is_figure(row[name]):
                    place = f"configurations[{i}].rows[{j}].{name}"
                    raise wrong(place, "is not a number from 0 to 2^53")
            yield suite_row(one["name"], {**row, "prompt": row["name"]})


def _loaded(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(user_text(path, _MOST_BYTES, TraceFileError))
    except JsonError as error:
        raise TraceFileError(f"{path}, {error}.", _WRITE_AGAIN) from error
    if not isinstance(data, dict) or data.get("kind") not in tuple(KINDS):
        raise TraceFileError(
            f"{path} is not a result of `draftscope bench suite`, `sweep` or `tune`.",
            "Name the JSON of --json, or the results.sqlite in the folder of --out.",
        )
    if data.get("version") != JSON_VERSION:
        raise TraceFileError(
            f"{path} has a version that this program does not read, which is not {JSON_VERSION}.",
            "Open it with the version of Draftscope that wrote it.",
        )
    return data


_LEAST_ROWID = -(2**63)


def find_results(path: Path) -> Path | None:
    """The results file that a path refers to: the file itself, also JSON, or the one in a folder;
    None for any other path. Reads the first bytes only."""
    file = results_file(path)
    return file if is_database(file) or kind_of_json(file) else None


def is_database(path: Path) -> bool:
    """Whether a path is a results file that can be extended. Reads the first bytes only."""
    head = file_head(path, 72)
    return head[:15] == b"SQLite format 3" and head[68:72] == APPLICATION_ID.to_bytes(4)


def read_results(path: Path) -> ExperimentResults:
    """Read results, from their folder, the file in it or JSON.

    Raises TraceFileError, in one sentence, if it cannot be read, is something else or has invalid
    contents.
    """
    file = results_file(Path(path))
    if file.suffix.lower() == ".json" or kind_of_json(file):
        return read_results_json(file)
    if file.is_file() and not is_database(file):
        raise not_ours(file)
    with opened_for_reading(file) as opened:
        check_tables(file, opened)
        return _read(file, opened)


def check_tables(path: Path, opened: sqlite3.Connection) -> None:
    """Raises TraceFileError unless the database has this version and exactly our tables."""
    (version,) = opened.execute("PRAGMA user_version").fetchone()
    if version != VERSION:
        raise TraceFileError(
            f"{path} has version {version}, this program reads {VERSION}.",
            "Open it with the version of Draftscope that wrote it.",
        )
    # a duplicate name, or one more, is not ours either
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
    """Each row's number (SQLite's rowid) and values, in file order. Raises TraceFileError naming
    the first unreadable row."""
    ((n,),) = opened.execute(f"SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT {MOST_ROWS + 1})")
    check_most(str(path), n, MOST_ROWS, "rows", "Split the plan.")
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
    """The unreadable row: some versions of Python are one row ahead."""
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
    """Limits the text read: more than the file's size would be repetition."""

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
"""CPU seconds."""
_LOCK_S = 3.0
_LOOK_EVERY = 10_000
"""SQLite instructions between two checks of the time."""
_VERSIONS = slice(18, 20)
"""Header bytes that say whether the file uses a write-ahead log."""
_AGAIN = "Measure again, or name another file."


@contextmanager
def opened_for_reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A consistent snapshot of the file, from the first query on.

    Raises TraceFileError if it is too large or too slow to read, locked, damaged, or has unexpected
    files next to it; also if reading fails in the body.
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
    opened.text_factory = bytes.decode  # the error then quotes no text
    end = thread_time() + _MOST_S  # a slow disk, or a sleeping machine, is not its fault
    opened.set_progress_handler(lambda: thread_time() > end, _LOOK_EVERY)
    for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON"):
        opened.execute(f"PRAGMA {pragma}")


def _check_files(path: Path) -> None:
    """Check that everything SQLite would open is a regular file of sensible size. Raises
    OSError."""
    with opened_file(path, TraceFileError) as file:
        head = file.read(100) or b""
        n_bytes = os.fstat(file.fileno()).st_size
        check_most(str(path), n_bytes, MOST_BYTES, "bytes", "Split the plan.")
    logs = [other for end in ("-wal", "-shm") if os.path.lexists(other := f"{path}{end}")]
    if logs or 2 in head[_VERSIONS]:
        beside = f" ({Path(logs[0]).name} is next to it)" if logs else ""
        raise TraceFileError(
            f"{path} has a write-ahead log{beside}, which sweeps do not write.",
            f"Merge it with `sqlite3 {path.name} 'PRAGMA journal_mode = delete'`.",
        )
    journal = Path(f"{path}-journal")
    if os.path.lexists(journal) and not journal.is_file():
        raise TraceFileError(f"{journal} is not a file.", "Remove it.")


def _explained(path: Path, error: sqlite3.Error) -> TraceFileError:
    """An SQLite error in words."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    said = shorten(str(error), 120)  # it may quote the file
    if code == sqlite3.SQLITE_INTERRUPT:
        return TraceFileError(f"{path} takes longer than {_MOST_S:.0f} s to read.", _AGAIN)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return TraceFileError(
            f"{path} is locked by another program.", "Wait, and read the file again."
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
        return TraceFileError(
            f"{path} was left in the middle of a write, or cannot be opened ({said}).",
            "Resume the sweep that writes it, or check the rights of its folder.",
        )
    return TraceFileError(f"{path} is damaged ({said}).", _AGAIN)
