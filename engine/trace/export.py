r"""Export of a trace to a folder of CSV files, one per table, with session.json.

UTF-8 without BOM, "\n" line ends, RFC 4180 quoting, a header row, no comment lines. A value that
was not observed is an empty field. Reals have nine significant digits, which is exact for float32.
The variant for spreadsheets differs as described in `engine.trace.csv_fields`.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.environment import version
from engine.errors import Cancelled, TraceFileError
from engine.files import PART, synced, unwritable, written_whole
from engine.long_work import ReportProgress, watched
from engine.trace.csv_fields import EXCEL, PLAIN, encoding, escape_piece, guard
from engine.trace.records import MISSING, N_TOP, SCHEMA_MINOR, SCHEMA_VERSION, TABLES, Column
from engine.trace.replacing import check_room, recover, replacing
from engine.trace.store import Table, TextPool, TraceStore
from engine.trace.timings import summary
from engine.trace.typed_json import strict_json
from kernels.processor import processor_name

SESSION_FILE = "session.json"
COLUMNS_FILE = "columns.csv"
"""A description of every column for readers; only exports have it."""
FORMAT = "draftscope-trace"
TOKEN_COLUMNS = {
    "token_hex": "bytes of the token, hexadecimal",
    "token_text": r"the same as text; \n, \t, \r, \\ and \xE4 are escapes",
}
"""Columns after token_id in tokens.csv, from the store's pieces."""

_BLOCK = 8192
_FILES = {SESSION_FILE, COLUMNS_FILE, *(f"{name}.csv" for name in TABLES)}


def csv_names(table: str, column: Column) -> list[str]:
    """Names of a column in the CSV header; token_id and "tops" columns have several."""
    if column.kind == "tops":
        return [f"{column.name}_{rank}" for rank in range(1, N_TOP + 1)]
    if (table, column.name) == ("tokens", "token_id"):
        return [column.name, *TOKEN_COLUMNS]
    return [column.name]


def header(table: Table) -> list[str]:
    """The header row of a table's CSV file."""
    return [name for column in table.columns for name in csv_names(table.name, column)]


def check_export(folder: Path) -> None:
    """Refuse a folder that an export could not write, before any work is done.

    Raises TraceFileError as `check_target` does, and OSError or ValueError.
    """
    check_target(folder)
    check_room(folder, _FILES)


def check_target(folder: Path) -> None:
    """Refuse a folder that an export may not replace.

    Raises TraceFileError unless the path is free, an empty folder, or an earlier export.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise TraceFileError(f"{folder} is not a folder.", "Name a folder for the trace.")
    names, ours = {entry.name for entry in folder.iterdir()}, _own_files(folder)
    if names and not (SESSION_FILE in names and names <= ours):
        foreign = sorted(names - ours) or sorted(names)
        raise TraceFileError(
            f"{folder} has files that are not a trace ({foreign[0]}).",
            "Choose another folder, or an empty one.",
        )


def _own_files(folder: Path) -> set[str]:
    """Files that an export writes, or once wrote into a folder, including tables unknown here."""
    more: set[str] = set()
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        if {path.name for path in folder.glob("*.csv")} - _FILES:
            rows = json.loads((folder / SESSION_FILE).read_bytes())["rows"]
            more = {f"{name}.csv" for name in rows}
    return _FILES | more | {path.name for path in folder.glob(f"{PART}*")}


def recover_export(folder: Path) -> None:
    """Restore the folder after an export was killed: the earlier trace or the complete new one.
    Raises OSError."""
    recover(folder, _own_files)


def export_csv(
    store: TraceStore,
    folder: Path,
    *,
    progress: ReportProgress | None = None,
    cancelled: Callable[[], bool] | None = None,
    excel_safe: bool = False,
) -> None:
    """Write every table of the store to `folder`, replacing an earlier export as a whole.

    excel_safe: write the variant that a spreadsheet opens without evaluating anything. The store
    may grow meanwhile: the rows present at the start are written. Raises TraceFileError if the
    folder contains anything else or cannot be written, Cancelled when `cancelled` turns true; in
    both cases nothing is left over and an earlier export stays.
    """
    folder = Path(folder).absolute()
    try:
        check_target(folder)
        with replacing(folder, check_target, _own_files) as stage:
            _write(store, stage, progress, cancelled, EXCEL if excel_safe else PLAIN)
    except OSError as error:
        raise unwritable(folder, error, "Choose another folder.", TraceFileError) from error


@dataclass(frozen=True, slots=True)
class SavedRows:
    """What a folder holds of a trace, by table: rows, the file size with them, and cells filled
    later; headers: the columns."""

    rows: dict[str, int]
    sizes: dict[str, int]
    filled: dict[str, int]
    headers: dict[str, list[str]]

    def can_go_on(self, store: TraceStore, folder: Path) -> bool:
        """Whether the saved rows equal the store's, so that only new rows need to be appended."""
        try:
            there = all(
                (folder / f"{name}.csv").stat().st_size >= size for name, size in self.sizes.items()
            )
        except OSError:
            return False
        tables = store.tables
        return (
            there
            and (folder / SESSION_FILE).exists()
            and self.filled == {name: table.n_filled for name, table in tables.items()}
            and self.headers == {name: header(table) for name, table in tables.items()}
            and all(len(tables[name]) >= n for name, n in self.rows.items())
        )


def append_csv(
    store: TraceStore,
    folder: Path,
    saved: SavedRows | None,
    *,
    progress: ReportProgress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> SavedRows:
    """Update a folder that holds `saved` of the store (None = nothing) and return what it then
    holds. If saved rows have changed, everything is written again.

    New rows are appended, and count once session.json states the new file sizes, so a crash at any
    moment leaves the old or the new trace. The store may grow meanwhile. Raises like export_csv;
    saved data stays as it was.
    """
    folder = Path(folder).absolute()
    filled = {name: table.n_filled for name, table in store.tables.items()}
    rows, sizes = dict[str, int](), dict[str, int]()
    try:
        if saved is not None and saved.can_go_on(store, folder):
            session = _write_tables(store, folder, progress, cancelled, PLAIN, saved, rows, sizes)
            for name in rows:
                if rows[name] > saved.rows[name]:
                    synced(folder / f"{name}.csv")
            with written_whole(folder / SESSION_FILE, TraceFileError) as part:
                write_session(part, session | {"bytes": sizes})
        else:
            check_target(folder)
            with replacing(folder, check_target, _own_files) as stage:
                session = _write_tables(store, stage, progress, cancelled, PLAIN, None, rows, sizes)
                write_session(stage / SESSION_FILE, session | {"bytes": sizes})
    except OSError as error:
        raise unwritable(folder, error, "Choose another folder.", TraceFileError) from error
    return SavedRows(rows, sizes, filled, {name: header(store.tables[name]) for name in rows})


def _write(
    store: TraceStore,
    stage: Path,
    progress: ReportProgress | None,
    cancelled: Callable[[], bool] | None,
    variant: str,
) -> None:
    session = _write_tables(store, stage, progress, cancelled, variant, None, {}, {})
    write_session(stage / SESSION_FILE, session)
    _write_columns(store, stage / COLUMNS_FILE, variant)
    if cancelled is not None and cancelled():
        raise Cancelled


def _write_tables(
    store: TraceStore,
    folder: Path,
    progress: ReportProgress | None,
    cancelled: Callable[[], bool] | None,
    variant: str,
    saved: SavedRows | None,
    rows: dict[str, int],
    sizes: dict[str, int],
) -> dict[str, Any]:
    """Write the rows after the saved ones of every table, and update rows and sizes (bytes);
    returns the content of session.json."""
    rows |= {name: len(table) for name, table in store.tables.items()}
    pieces = dict(store.pieces)  # after the counts, so that every token of those rows is included
    session = _session(store, rows, pieces) | {"csv_variant": variant}
    firsts = saved.rows if saved else dict.fromkeys(rows, 0)
    total = sum(rows.values()) - sum(firsts.values())
    done = 0
    for name, table in store.tables.items():
        with open(
            folder / f"{name}.csv",
            "r+" if saved else "w",
            encoding=encoding(variant),
            errors="backslashreplace",
            newline="",
        ) as file:
            writer = csv.writer(file, lineterminator="\n")
            if saved:  # drop the remains of an interrupted attempt
                file.seek(saved.sizes[name])
                file.truncate()
            else:
                names = header(table)
                writer.writerow(guard(names) if variant == EXCEL else names)
            for start in watched(range(firsts[name], rows[name], _BLOCK), cancelled):
                stop = min(start + _BLOCK, rows[name])
                fields = _fields(store, table, start, stop, pieces)
                if variant == EXCEL:
                    fields = [guard(column) for column in fields]
                writer.writerows(zip(*fields, strict=True))
                done += stop - start
                if progress is not None:
                    progress(done, total, f"writing {name}.csv")
            file.flush()
            sizes[name] = os.fstat(file.fileno()).st_size
    return session


def _write_columns(store: TraceStore, path: Path, variant: str) -> None:
    rows = [("table", "column", "unit", "meaning")]
    for table in store.tables.values():
        for column in table.columns:
            for name in csv_names(table.name, column):
                meaning = TOKEN_COLUMNS.get(name, column.about)
                rows.append((table.name, name, column.unit, meaning))
    with open(path, "w", encoding=encoding(variant), newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows(map(guard, rows) if variant == EXCEL else rows)


def write_session(path: Path, session: dict[str, Any]) -> None:
    """Write session.json, which describes a trace."""
    text = json.dumps(session, ensure_ascii=False, indent=1) + "\n"
    path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def _fields(
    store: TraceStore, table: Table, start: int, stop: int, pieces: dict[int, bytes]
) -> list[list[Any]]:
    """Rows start..stop as CSV fields, one list per CSV column."""
    fields: list[list[Any]] = []
    for column in table.columns:
        values = table.column(column.name, start, stop)
        if column.kind == "tops":
            fields.extend(_numbers(values[:, rank]) for rank in range(N_TOP))
        elif column.kind == "text":
            fields.append(_texts(values, store.text_pool))
        else:
            fields.append(_numbers(values))
        if table.name == "tokens" and column.name == "token_id":
            fields.extend(_token_fields(values, pieces))
    return fields


def _numbers(values: np.ndarray) -> list[Any]:
    n = len(values)
    if values.dtype.kind == "i":
        missing = values == MISSING
        if missing.all():
            return [""] * n
        numbers = values.tolist()
        if missing.any():
            return ["" if v == MISSING else v for v in numbers]
        return numbers
    if np.isnan(values).all():
        return [""] * n
    # one formatting call per block is three times as fast as one per number
    joined = ("%.9g," * n)[:-1] % tuple(values.tolist())
    return joined.replace("nan", "").split(",")


def _texts(codes: np.ndarray, pool: TextPool) -> list[str]:
    # the csv module does not quote a lone carriage return, and a reader would end the row there
    texts = {
        code: pool.text(code).replace("\r\n", "\n").replace("\r", "\n")
        for code in np.unique(codes).tolist()
    }
    return [texts[code] for code in codes.tolist()]


def _token_fields(ids: np.ndarray, pieces: dict[int, bytes]) -> tuple[list[str], list[str]]:
    known = {i: pieces.get(i, b"") for i in np.unique(ids).tolist()}
    as_hex = {i: piece.hex() for i, piece in known.items()}
    as_text = {i: escape_piece(piece) for i, piece in known.items()}
    tokens = ids.tolist()
    return [as_hex[i] for i in tokens], [as_text[i] for i in tokens]


def _session(store: TraceStore, rows: dict[str, int], pieces: dict[int, bytes]) -> dict[str, Any]:
    """The content of session.json. A reopened run keeps its own environment and summary."""
    runs = {
        str(run_id): {"environment": _environment(), "summary": summary(store, run_id)} | facts
        for run_id, facts in list(store.runs.items())
    }
    return strict_json(store.more_facts) | {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "schema_minor": SCHEMA_MINOR,
        "runs": strict_json(runs),
        "rows": rows,
        "columns": {name: _column_docs(table) for name, table in store.tables.items()},
        "unknown_columns": store.unknown_columns(),
        "pieces": {str(token): pieces[token].hex() for token in sorted(pieces)},
    }


def _column_docs(table: Table) -> dict[str, str]:
    docs = {column.name: column.about for column in table.columns}
    return docs | (TOKEN_COLUMNS if table.name == "tokens" else {})


def _environment() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    return {
        "draftscope": version(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__) if torch is not None else None,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": processor_name(),
        "cpu_count": os.cpu_count(),
    }
