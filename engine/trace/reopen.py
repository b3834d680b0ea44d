"""An exported trace read back into the tables it came from.

The folder may come from anyone: every header, type and row length is checked, and the numbers
that a view turns into rows or columns of a picture are bounded.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import Cancelled, TraceFileError
from engine.trace.export import FORMAT, SESSION_FILE, Progress, header
from engine.trace.records import (
    MISSING,
    N_TOP,
    ROLLBACK_PATHS,
    SCHEMA_VERSION,
    SLOT_STATES,
    TABLES,
    TOKEN_KINDS,
    Column,
)
from engine.trace.spreadsheet import EXCEL, PLAIN, encoding, unguard
from engine.trace.store import Table, TraceStore

_BLOCK = 512
"""Rows at a time: their fields as text still fit into the cache, which halves the time."""
_MAX_SESSION_BYTES = 256 << 20
_CHOICES = {
    "kind": frozenset(TOKEN_KINDS),
    "state": frozenset(SLOT_STATES),
    "rollback_path": frozenset((*ROLLBACK_PATHS, "")),
}
_UPPER = {
    "round": 10**8,
    "seq_id": 65535,
    "slot": 4095,
    "layer": 4095,
    "draft_index": 4095,
    "num_raw": 4095,
    "num_draft_tokens": 4095,
    "num_accepted_draft_tokens": 4095,
    "rollback_depth": 4095,
    "n_rs_seq": 4095,
}
_REMEDY = "Export the trace again."
_DIGITS = b"0123456789+-.eE,"
_LINE_END = re.compile(r"\r\n|\r|\n")


def find_trace(path: Path) -> Path | None:
    """The folder of the exported trace that a path means: the folder itself or a file in it."""
    folder = path if path.is_dir() else path.parent
    named = path.is_dir() or (path.is_file() and (path.name == SESSION_FILE or path.stem in TABLES))
    return folder if named and (folder / SESSION_FILE).is_file() else None


def open_trace(
    folder: Path, *, progress: Progress | None = None, cancelled: Callable[[], bool] | None = None
) -> TraceStore:
    """Fill a new store from a folder written by export_csv, in either variant.

    Raises TraceFileError, naming file and line, for anything that export_csv would not write,
    and Cancelled when `cancelled` turns true.
    """
    folder = Path(folder)
    session = _read_session(folder / SESSION_FILE)
    variant = session.get("csv_variant", PLAIN)
    if variant not in (PLAIN, EXCEL):
        raise TraceFileError(f"{SESSION_FILE}: csv_variant {variant!r} is unknown.", _REMEDY)
    total = sum(rows for rows in session["rows"].values() if isinstance(rows, int))
    store = TraceStore()
    store.runs.update(_runs(session))
    store.pieces.update(_pieces(session))
    for name in TABLES:
        path = folder / f"{name}.csv"
        try:
            for _ in _fill(store, store.tables[name], path, variant):
                if cancelled is not None and cancelled():
                    raise Cancelled
                if progress is not None:
                    progress(store.size(), total, f"reading {name}.csv")
        except FileNotFoundError:
            raise TraceFileError(f"{path} is missing.", _REMEDY) from None
        except OSError as error:
            raise _unreadable(path, error) from error
        except UnicodeDecodeError as error:
            raise TraceFileError(f"{path} is not UTF-8 text.", _REMEDY) from error
        if session["rows"].get(name) != len(store.tables[name]):
            raise TraceFileError(
                f"{path} has {len(store.tables[name])} rows where {SESSION_FILE} announces "
                f"{session['rows'].get(name)}.",
                _REMEDY,
            )
    return store


def _read_session(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_SESSION_BYTES:
            raise TraceFileError(f"{path} is too large for a trace.", _REMEDY)
        session = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise TraceFileError(
            f"{path.parent} is no exported trace: {SESSION_FILE} is missing.",
            "Choose the folder that an export wrote.",
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise TraceFileError(f"{path} is not valid JSON.", _REMEDY) from error
    if not isinstance(session, dict) or session.get("format") != FORMAT:
        raise TraceFileError(
            f"{path} does not describe a trace.", "Choose the folder that an export wrote."
        )
    found = session.get("schema_version")
    if found != SCHEMA_VERSION:
        raise TraceFileError(
            f"{path} has schema version {found!r}, this program reads {SCHEMA_VERSION}.",
            "Open it with the version of Draftscope that wrote it.",
        )
    for key in ("runs", "rows", "pieces"):
        if not isinstance(session.get(key), dict):
            raise TraceFileError(f"{path}: {key} is missing or no object.", _REMEDY)
    return session


def _runs(session: dict[str, Any]) -> dict[int, dict[str, Any]]:
    runs = session["runs"]
    if list(runs) != [str(run_id) for run_id in range(len(runs))]:
        raise TraceFileError(f"{SESSION_FILE}: runs are not numbered from 0.", _REMEDY)
    if not all(isinstance(facts, dict) for facts in runs.values()):
        raise TraceFileError(f"{SESSION_FILE}: a run is no object.", _REMEDY)
    return {int(run_id): facts for run_id, facts in runs.items()}


def _pieces(session: dict[str, Any]) -> dict[int, bytes]:
    try:
        return {int(token): bytes.fromhex(piece) for token, piece in session["pieces"].items()}
    except (ValueError, TypeError) as error:
        raise TraceFileError(
            f"{SESSION_FILE}: pieces are not token ids with hexadecimal bytes.", _REMEDY
        ) from error


def _fill(store: TraceStore, table: Table, path: Path, variant: str) -> Iterator[None]:
    """Read one file; it yields after each block of rows."""
    with path.open(encoding=encoding(variant), newline="") as file:
        reader = csv.reader(file, strict=True)
        expected = header(table.name)
        try:
            if next(reader, None) != expected:
                raise TraceFileError(
                    f"{path} line 1: the header row is not the one of schema "
                    f"version {SCHEMA_VERSION}.",
                    _REMEDY,
                )
            for lines, rows in _blocks(reader, len(expected), path):
                if variant == EXCEL:
                    rows = [unguard(row) for row in rows]
                _Block(store, path, lines, rows).add_to(table)
                yield
        except csv.Error as error:
            raise TraceFileError(
                f"{path} line {reader.line_num}: not valid CSV ({error}).", _REMEDY
            ) from error


def _blocks(reader: Any, width: int, path: Path) -> Iterator[tuple[Sequence[int], list[list[str]]]]:
    """Blocks of rows with the line that each row ends on."""
    line: int = reader.line_num
    while rows := list(islice(reader, _BLOCK)):
        lines: Sequence[int] = range(line + 1, line + 1 + len(rows))
        if reader.line_num != lines[-1]:  # there are fields of several lines
            lines = _line_ends(rows, line)
        if set(map(len, rows)) != {width}:
            at = next(i for i, row in enumerate(rows) if len(row) != width)
            raise TraceFileError(
                f"{path} line {lines[at]}: {len(rows[at])} fields instead of {width}.", _REMEDY
            )
        yield lines, rows
        line = reader.line_num


def _line_ends(rows: list[list[str]], line: int) -> list[int]:
    ends = []
    for row in rows:
        line += 1 + sum(len(_LINE_END.findall(field)) for field in row)
        ends.append(line)
    return ends


class _Block:
    """Some rows of one file on their way into a table."""

    def __init__(
        self, store: TraceStore, path: Path, lines: Sequence[int], rows: list[list[str]]
    ) -> None:
        self._store = store
        self._path = path
        self._lines = lines
        self._fields = dict(zip(header(path.stem), zip(*rows, strict=True), strict=True))

    def add_to(self, table: Table) -> None:
        columns = {column.name: self._values(column) for column in table.columns}
        if table.name == "tokens":
            self._check_pieces(columns["token_id"])
        table.extend(columns)

    def _values(self, column: Column) -> Any:
        if column.kind == "text":
            return self._texts(column.name)
        if column.kind == "int":
            values = self._numbers(column.name, np.dtype(np.int64))
            self._check_range(column.name, values)
            return values
        if column.kind == "real":
            return self._numbers(column.name, np.dtype(np.float64))
        dtype = np.dtype(np.int32 if column.name.endswith("_id") else np.float32)
        ranks = range(1, N_TOP + 1)
        return np.stack([self._numbers(f"{column.name}_{r}", dtype) for r in ranks], axis=1)

    def _texts(self, name: str) -> tuple[str, ...]:
        values = self._fields[name]
        allowed = _CHOICES.get(name)
        if allowed is not None and not allowed.issuperset(values):
            row = next(i for i, value in enumerate(values) if value not in allowed)
            raise self._wrong(row, name, f"one of {', '.join(sorted(allowed - {''}))}")
        return values

    def _numbers(self, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        values = self._fields[name]
        quick = _parse_digits(values, dtype)
        if quick is not None:
            return quick
        try:
            return _parse(values, dtype)
        except (ValueError, OverflowError, FloatingPointError):
            for row, value in enumerate(values):
                try:
                    _parse((value,), dtype)
                except (ValueError, OverflowError, FloatingPointError):
                    what = "a whole number" if dtype.kind == "i" else "a number"
                    raise self._wrong(row, name, f"{what} or an empty field") from None
            raise

    def _check_range(self, name: str, values: np.ndarray) -> None:
        if name == "run_id":
            bad = (values < 0) | (values >= len(self._store.runs))
            wanted = f"a run of {SESSION_FILE}"
        elif name in _UPPER:
            bad = (values != MISSING) & ((values < 0) | (values > _UPPER[name]))
            wanted = f"between 0 and {_UPPER[name]}"
        else:
            return
        if bad.any():
            raise self._wrong(int(bad.argmax()), name, wanted)

    def _check_pieces(self, ids: np.ndarray) -> None:
        pieces = self._store.pieces
        known = {i: pieces.get(i, b"").hex() for i in np.unique(ids).tolist()}
        found = self._fields["token_hex"]
        wanted = tuple(map(known.__getitem__, ids.tolist()))
        if found != wanted:
            row = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
            raise self._wrong(row, "token_hex", f"the bytes that {SESSION_FILE} gives")

    def _wrong(self, row: int, column: str, wanted: str) -> TraceFileError:
        value = self._fields[column][row]
        shown = value if len(value) <= 40 else f"{value[:40]}…"
        return TraceFileError(
            f"{self._path} line {self._lines[row]}: {column} {shown!r} is not {wanted}.", _REMEDY
        )


def _parse_digits(values: Sequence[str], dtype: np.dtype[Any]) -> np.ndarray | None:
    """What `_parse` gives, in a fifth of its time; None where it takes a closer look."""
    whole = dtype.kind == "i"
    limit = 1 << (31 if dtype.itemsize == 4 else 62)  # beyond, a number may have been cut to fit
    text = ",".join(values)
    if not text.isascii() or text.encode().translate(None, _DIGITS):
        return None
    text = f",{text},"
    if ",," in text:
        missing = f",{MISSING if whole else 'nan'},"
        text = text.replace(",,", missing).replace(",,", missing)
    try:
        numbers = np.fromstring(text[1:-1], np.int64 if whole else np.float64, sep=",")
        if len(numbers) != len(values):
            return None
        if whole and (numbers.min() < -limit or numbers.max() >= limit):
            return None
        with np.errstate(over="raise"):
            return numbers.astype(dtype, copy=False)
    except (ValueError, FloatingPointError, DeprecationWarning):
        return None


def _parse(values: Sequence[str], dtype: np.dtype[Any]) -> np.ndarray:
    """Numbers from fields, an empty one is not observed. Raises for anything else."""
    whole = dtype.kind == "i"
    if "" in values:
        missing = str(MISSING) if whole else "nan"
        values = [value or missing for value in values]
    with np.errstate(over="raise"):
        return np.array(list(map(int if whole else float, values)), dtype)


def _unreadable(path: Path, error: OSError) -> TraceFileError:
    return TraceFileError(
        f"{path} cannot be read: {error.strerror or error}.", "Check the folder and its rights."
    )
