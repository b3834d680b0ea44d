"""Reopening of an exported trace.

The folder is untrusted: types, ranges, order and lengths are checked here, so that views can rely
on the store. `engine.trace.records` lists the checks of each column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import TraceFileError
from engine.files import opened_file
from engine.long_work import ReportProgress, watched
from engine.trace.csv_fields import (
    EXCEL,
    REMEDY,
    FieldBlock,
    NotANumberError,
    read_blocks,
    read_header,
    real_numbers,
    unguard,
    whole_numbers,
)
from engine.trace.export import SESSION_FILE, csv_names
from engine.trace.records import MISSING, TABLES, Column
from engine.trace.session_file import SessionFile, read_session
from engine.trace.store import Table, TraceStore

_MOST_COLUMNS = 1000
_MOST_NAMES = 1000
_NAMES = frozenset(("drafter", "accept_rule", "stop_kind", "purpose", "lane", "rule"))
"""Text columns with a fixed set of names, each of which views handle."""
_FEW = 16
"""Up to this many distinct texts of a column are searched for in all its rows at once."""


def find_trace(path: Path) -> Path | None:
    """The folder of the exported trace that a path refers to: the folder itself or a file in it."""
    folder = path if path.is_dir() else path.parent
    named = path.is_dir() or (path.is_file() and (path.name == SESSION_FILE or path.stem in TABLES))
    return folder if named and (folder / SESSION_FILE).is_file() else None


def open_trace(
    folder: Path,
    *,
    progress: ReportProgress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> TraceStore:
    """Fill a new store from a folder written by export_csv, in either variant.

    Raises TraceFileError, naming file and line, for anything that export_csv would not write,
    and Cancelled when `cancelled` turns true.
    """
    folder = Path(folder)
    session = read_session(folder / SESSION_FILE)
    store = TraceStore()
    store.runs.update(session.runs)
    store.pieces.update(session.pieces)
    store.more_facts = session.more
    total = store.size() + sum(session.rows.values())
    for name in dict.fromkeys((*TABLES, *session.rows)):
        path = folder / f"{name}.csv"
        is_later = name in TABLES and all(c.since > session.minor for c in TABLES[name])
        if name not in session.rows and is_later:
            continue
        if name not in store.tables:
            store.add_table(name)
        try:
            for _ in watched(_fill(store, store.tables[name], path, session), cancelled):
                if progress is not None:
                    progress(store.size(), total, f"reading {name}.csv")
        except UnicodeDecodeError as error:
            raise TraceFileError(f"{path} is not UTF-8 text.", REMEDY) from error
        announced, n = session.rows.get(name), len(store.tables[name])
        if announced != n:
            raise TraceFileError(
                f"{path} has {n} rows where {SESSION_FILE} announces {announced}.", REMEDY
            )
    return store


def _fill(store: TraceStore, table: Table, path: Path, session: SessionFile) -> Iterator[None]:
    """Read one file; yields after each block of rows."""
    if not path.exists():
        raise TraceFileError(f"{path} is missing.", REMEDY)
    with opened_file(path, TraceFileError) as file:
        names = read_header(file, str(path), session.variant)
        rows = _FileRows(store, table, names, path, session)
        size = session.sizes.get(table.name)
        for block in read_blocks(file, str(path), rows.n_columns, size):
            rows.add(block)
            yield
    yield


class _FileRows:
    """The rows of one file while they are added to a table."""

    def __init__(
        self, store: TraceStore, table: Table, names: list[str], path: Path, session: SessionFile
    ) -> None:
        self._store, self._table, self._path = store, table, path
        self._at = {name: i for i, name in enumerate(names)}
        self._guarded = session.variant == EXCEL
        self._codes: dict[str, dict[bytes, int]] = {}
        self._last_rounds = np.full(len(store.runs), -1, np.int64)
        self.n_columns = len(names)
        self._columns = self._present(table.columns, session.minor)
        self._keep_others(names, session.about.get(table.name, {}))

    def _present(self, columns: Sequence[Column], minor: int) -> list[Column]:
        """Columns present in the file. Raises if a required one is missing."""
        present = []
        for column in columns:
            missing = [name for name in csv_names(self._table.name, column) if name not in self._at]
            if not missing:
                present.append(column)
            elif column.since <= minor:
                raise TraceFileError(
                    f"{self._path} line 1: column {missing[0]} is missing.", REMEDY
                )
        return present

    def _keep_others(self, names: list[str], about: dict[str, str]) -> None:
        """Add columns that the schema does not know."""
        known = {name for c in self._columns for name in csv_names(self._table.name, c)}
        others = [name for name in names if name not in known]
        taken = {column.name for column in self._table.columns}
        if len(others) > _MOST_COLUMNS or not taken.isdisjoint(others):
            raise TraceFileError(
                f"{self._path} line 1: columns beyond those of a trace cannot be kept.", REMEDY
            )
        for name in others:
            column = Column(name, "text", about.get(name, ""))
            self._table.add_column(column)
            self._columns.append(column)

    def add(self, block: FieldBlock) -> None:
        """Check the rows of a block and add them."""
        values = {column.name: self._values(block, column) for column in self._columns}
        if self._table.name in TABLES:
            self._check_rows(block, values)
        self._table.extend(values)

    def _values(self, block: FieldBlock, column: Column) -> np.ndarray:
        if column.kind == "text":
            return self._texts(block, column)
        if column.kind == "int":
            return self._numbers(block, column, column.name, np.dtype(np.int64))
        if column.kind == "real":
            return self._numbers(block, column, column.name, np.dtype(np.float64))
        dtype: np.dtype[Any] = np.dtype(np.int32 if column.is_whole else np.float32)
        names = csv_names(self._table.name, column)
        return np.stack([self._numbers(block, column, name, dtype) for name in names], axis=1)

    def _numbers(
        self, block: FieldBlock, column: Column, name: str, dtype: np.dtype[Any]
    ) -> np.ndarray:
        whole, at = dtype.kind == "i", self._at[name]
        try:
            values = whole_numbers(block, at, MISSING) if whole else real_numbers(block, at)
        except NotANumberError as error:
            what = "a whole number" if whole else "a number"
            what = what if column.required else f"{what} or an empty field"
            raise self._wrong(block, error.args[0], name, what) from None
        observed = values != MISSING if whole else ~np.isnan(values)
        if column.required and not observed.all():
            raise block.error(int(observed.argmin()), f"{name} is empty")
        outside = observed & ((values < column.least) | (values > column.most))
        if outside.any():
            wanted = f"between {column.least:.15g} and {column.most:.15g}"
            raise self._wrong(block, int(outside.argmax()), name, wanted)
        return values.astype(dtype, copy=False)

    def _texts(self, block: FieldBlock, column: Column) -> np.ndarray:
        """Codes of the store's texts, int32 [rows]."""
        known = self._codes.setdefault(column.name, {})
        found = np.full(block.n_rows, -1, np.int32)
        left = np.flatnonzero(block.are_short(self._at[column.name]))
        words = block.short_texts(self._at[column.name])
        for _ in range(_FEW):
            if not len(left):
                break
            same = (words[:, left] == words[:, left[:1]]).all(axis=0)
            (cell,) = block.cells(self._at[column.name], left[:1])
            if cell not in known:
                self._learn(block, column, known, int(left[0]), cell)
            found[left[same]] = known[cell]
            left = left[~same]
        rows = np.flatnonzero(found < 0)
        if len(rows):
            cells = block.cells(self._at[column.name], rows)
            for row, cell in zip(rows.tolist(), cells, strict=True):
                if cell not in known:
                    self._learn(block, column, known, row, cell)
            found[rows] = list(map(known.__getitem__, cells))
        return found

    def _learn(
        self, block: FieldBlock, column: Column, known: dict[bytes, int], row: int, cell: bytes
    ) -> None:
        """Check a text on first sight and assign a code."""
        text = cell.decode()
        if self._guarded:
            (text,) = unguard([text])
        if column.choices and text not in column.choices:
            wanted = f"one of {', '.join(sorted(filter(None, column.choices)))}"
            raise self._wrong(block, row, column.name, wanted)
        if column.name in _NAMES and len(known) >= _MOST_NAMES:
            raise self._wrong(block, row, column.name, f"one of at most {_MOST_NAMES:,} names")
        known[cell] = self._store.text_pool.code(text)

    def _check_rows(self, block: FieldBlock, values: dict[str, np.ndarray]) -> None:
        runs = values["run_id"]
        unknown = runs >= len(self._store.runs)
        if unknown.any():
            raise self._wrong(block, int(unknown.argmax()), "run_id", f"a run of {SESSION_FILE}")
        if self._table.name != "findings":
            self._check_order(block, runs, values["round"])
        if self._table.name == "tokens":
            self._check_pieces(block, values["token_id"])

    def _check_order(self, block: FieldBlock, runs: np.ndarray, rounds: np.ndarray) -> None:
        """Raise unless each run's rounds rise from row to row, across blocks too."""
        order = np.argsort(runs, kind="stable")
        runs, rounds = runs[order], rounds[order]
        first = np.diff(runs, prepend=-1) != 0
        before = np.roll(rounds, 1)
        before[first] = self._last_rounds[runs[first]]
        back = rounds < before
        if back.any():
            row = int(order[back].min())
            raise self._wrong(block, row, "round", "that of the row before or a later one")
        last = np.append(first[1:], True)
        self._last_rounds[runs[last]] = rounds[last]

    def _check_pieces(self, block: FieldBlock, ids: np.ndarray) -> None:
        """Check that a token's bytes equal those in session.json in every row."""
        at, pieces = self._at["token_hex"], self._store.pieces
        tokens, rows, which = np.unique(ids, return_index=True, return_inverse=True)
        wanted = [pieces.get(token, b"").hex().encode() for token in tokens.tolist()]
        found = block.cells(at, rows)
        words, short = block.short_texts(at), block.are_short(at)
        same = np.array([a == b for a, b in zip(found, wanted, strict=True)])[which]
        same &= (words == words[:, rows[which]]).all(axis=0)
        long = np.flatnonzero(~short)
        cells = block.cells(at, long)
        same[long] = [a == wanted[i] for a, i in zip(cells, which[long].tolist(), strict=True)]
        if not same.all():
            row = int(same.argmin())
            raise self._wrong(block, row, "token_hex", f"the bytes that {SESSION_FILE} gives")

    def _wrong(self, block: FieldBlock, row: int, column: str, wanted: str) -> TraceFileError:
        (cell,) = block.cells(self._at[column], [row])
        value = cell[:200].decode(errors="replace")
        shown = value if len(value) <= 40 else f"{value[:40]}…"
        return block.error(row, f"{column} {shown!r} is not {wanted}")
