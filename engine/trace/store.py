"""The trace store: append-only columns, one writer, any number of readers.

The engine thread appends; the window reads slices at its own pace without a lock. This is safe
because a row is complete before the row count that publishes it grows, and because growing a table
makes new arrays and never moves rows that a reader already holds. Rows never change; only cells
that were not observed may be filled later, by the same thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from engine.trace.facts import RunFacts
from engine.trace.records import MISSING, N_TOP, TABLES, Column

_FIRST_CAPACITY = 1024
_DTYPES = {"int": np.int64, "real": np.float64, "text": np.int32}

LOOK_S = 1 / 15
"""Interval at which a growing trace is polled, seconds."""


class Table:
    """Columns of equal length. One thread may append, others may read at any time."""

    def __init__(self, name: str, columns: tuple[Column, ...], texts: TextPool) -> None:
        self.name = name
        self.columns = columns
        self._texts = texts
        self._n = 0
        self.n_filled = 0
        """Number of cells filled after their rows had been added."""
        self._capacity = _FIRST_CAPACITY
        self._named = {c.name: c for c in columns}
        self._arrays: dict[str, np.ndarray] = {}
        """Columns whose cells differ."""
        self._same: dict[str, Any] = {}
        """The value in all rows of a column without an array, if anything was observed."""
        self._text_columns = frozenset(c.name for c in columns if c.kind == "text")

    def __len__(self) -> int:
        return self._n

    def add_column(self, column: Column) -> None:
        """Add a column that the schema does not know, before the first row."""
        assert not self._n
        self.columns = (*self.columns, column)
        self._named[column.name] = column
        self._text_columns |= {column.name} if column.kind == "text" else set()

    def blank(self, name: str) -> int | float:
        """The value for "not observed"; for texts the code of the empty one."""
        return _blank(self._named[name])

    def append(self, **values: Any) -> int:
        """Add one row and return its index; missing columns are not observed."""
        named = {self.columns[0].name: None} | values
        self.extend({name: [value] for name, value in named.items()})
        return self._n - 1

    def extend(self, columns: Mapping[str, Sequence[Any] | np.ndarray], **same: Any) -> None:
        """Add many rows at once from equally long columns: arrays, or values, None where one is not
        observed. Text columns hold str, or, in arrays of int32, codes of the store's texts. Raises
        ValueError if their lengths differ."""
        lengths = {len(values) for values in columns.values()}
        if len(lengths) != 1:
            raise ValueError(f"{self.name}: columns of different lengths: {sorted(lengths)}")
        n = lengths.pop()
        if not n:
            return
        for name, values in columns.items():
            if isinstance(values, np.ndarray):
                same[name] = values
                continue
            column, first = self._named[name], values[0]
            is_tops = column.kind == "tops"
            is_same = (first is None or not is_tops) and values[-1] == first
            if is_same and values.count(first) == n:
                if first is not None:
                    same[name] = first
            elif is_tops:  # rows may have fewer than N_TOP
                sizes = np.array([0 if one is None else len(one) for one in values])
                cells = np.full((n, N_TOP), _blank(column), _empty(column, 0).dtype)
                is_there = np.arange(N_TOP) < sizes[:, None]
                cells[is_there] = [*chain.from_iterable(one for one in values if one is not None)]
                same[name] = cells
            elif column.kind == "text":
                same[name] = [one or "" for one in values]
            elif column.kind == "real":
                same[name] = np.array(values, np.float64)  # None becomes NaN
            else:
                is_whole = None not in values
                same[name] = values if is_whole else [MISSING if v is None else v for v in values]
        self._put(n, same)

    def reserve(self, n: int) -> None:
        """Reserve room for n more rows."""
        if self._n + n > self._capacity:
            self._grow(self._n + n)

    def _put(self, n: int, columns: Mapping[str, Any]) -> None:
        """Add n rows; a single value applies to all of them."""
        start, stop = self._n, self._n + n
        if stop > self._capacity:
            self._grow(stop)
        for name in (self._arrays.keys() | self._same.keys()) - columns.keys():
            self._array(name)[start:stop] = _blank(self._named[name])
        for name, values in columns.items():
            if isinstance(values, str):
                values = self._texts.code(values)
            elif name in self._text_columns and getattr(values, "dtype", None) != np.int32:
                values = self._texts.codes(values)
            is_same = name not in self._arrays and isinstance(values, int | float)
            if is_same and not start:
                self._same[name] = values
            if not is_same or values != self._held(name):
                self._array(name)[start:stop] = values
        self._n = stop

    def fill(self, rows: np.ndarray, columns: Mapping[str, np.ndarray | list[Any]]) -> None:
        """Fill unobserved cells of these rows; others stay.

        rows: int64 [n], unique. columns: [n], or [n, N_TOP] for "tops"; for text columns codes.
        """
        blanks = {column.name: _blank(column) for column in self.columns}
        for name, values in columns.items():
            array, blank = self._array(name), blanks[name]
            cells = array[rows]
            is_empty = np.isnan(cells) if blank != blank else cells == blank
            array[rows] = np.where(is_empty, values, cells)
            self.n_filled += int(is_empty.sum())

    def column(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A read-only view of rows start..stop of one column; text columns give int32 codes."""
        n = self._n  # read n before the array, which is then at least this long
        rows = slice(start, n if stop is None else min(stop, n))
        if (array := self._arrays.get(name)) is None:
            one = _empty(self._named[name], 1)
            one[:] = self._held(name)
            return np.broadcast_to(one[0], (len(range(n)[rows]), *one.shape[1:]))
        view = array[rows]
        view.flags.writeable = False
        return view

    def texts(self, name: str, start: int = 0, stop: int | None = None) -> list[str]:
        """A text column as strings."""
        return self._texts.decode(self.column(name, start, stop))

    def row(self, index: int) -> dict[str, Any]:
        """One row as Python values; None = not observed."""
        if not 0 <= index < self._n:
            raise IndexError(f"{self.name}: row {index} of {self._n}")
        return {c.name: self._value(c, index) for c in self.columns}

    def n_bytes(self) -> int:
        """Memory taken by rows, bytes; reserved pages are untouched and take none."""
        return self._n * sum(array[:1].nbytes for array in self._arrays.values())

    def _value(self, column: Column, index: int) -> Any:
        raw = self.column(column.name, index, index + 1)[0]
        if column.kind == "text":
            return self._texts.text(int(raw))
        if column.kind == "tops":
            return [_observed(v) for v in raw.tolist()]
        return _observed(raw.item())

    def _array(self, name: str) -> np.ndarray:
        """The array of a column, allocated on demand."""
        if (array := self._arrays.get(name)) is None:
            array = _empty(self._named[name], self._capacity)
            array[: self._n] = self._held(name)
            self._arrays[name] = array
        return array

    def _held(self, name: str) -> Any:
        """What all rows have of a column without an array."""
        return self._same[name] if name in self._same else _blank(self._named[name])

    def _grow(self, needed: int) -> None:
        capacity = max(needed, self._capacity * 2)
        for name, array in self._arrays.items():  # one at a time, so that only one is held twice
            grown = _empty(self._named[name], capacity)
            grown[: self._n] = array[: self._n]
            self._arrays[name] = grown
        self._capacity = capacity


class TextPool:
    """Strings seen in text columns, each stored once; code 0 is the empty string."""

    def __init__(self) -> None:
        self._texts: list[str] = [""]
        self._codes: dict[str, int] = {"": 0}

    def code(self, text: str) -> int:
        """The code of a string, assigned on first sight."""
        code = self._codes.get(text)
        return self.codes([text])[0] if code is None else code

    def codes(self, texts: Sequence[str] | np.ndarray) -> list[int]:
        """The codes of strings."""
        try:
            return list(map(self._codes.__getitem__, texts))
        except KeyError:
            new = [text for text in dict.fromkeys(texts) if text not in self._codes]
            codes = range(len(self._texts), len(self._texts) + len(new))
            self._texts += new
            self._codes.update(zip(new, codes, strict=True))
            return list(map(self._codes.__getitem__, texts))

    def find(self, text: str) -> int:
        """The code of a string, -1 if no row contains it yet."""
        return self._codes.get(text, -1)

    def text(self, code: int) -> str:
        return self._texts[code]

    def decode(self, codes: Iterable[int] | np.ndarray) -> list[str]:
        texts = self._texts
        return [texts[c] for c in (codes.tolist() if isinstance(codes, np.ndarray) else codes)]


class TraceStore:
    """All tables of a session, the texts of its tokens, and what is known of its runs.

    runs: run_id -> its facts (options in effect, model identity, timings when finished).
    pieces: token id -> bytes, for every token id that occurs in the tables.
    more_facts: of session.json of an opened trace, what this program knows nothing of.
    rows_in: the folder that alone has the rows, so that nothing of the tables can be said; None
        while they are here.
    """

    def __init__(self) -> None:
        pool = TextPool()
        self._hold(pool, {name: Table(name, cols, pool) for name, cols in TABLES.items()})
        self.runs: dict[int, RunFacts] = {}
        self.pieces: dict[int, bytes] = {}
        self.more_facts: dict[str, Any] = {}
        self.rows_in: Path | None = None

    def _hold(self, pool: TextPool, tables: dict[str, Table]) -> None:
        self.text_pool, self.tables = pool, tables
        self.rounds = tables["rounds"]
        self.tokens = tables["tokens"]
        self.drafts = tables["drafts"]
        self.ubatches = tables["ubatches"]
        self.memory = tables["memory"]
        self.divergence = tables["divergence"]
        self.states = tables["states"]
        self.findings = tables["findings"]

    def begin_run(self, facts: Mapping[str, Any]) -> int:
        """Register a run before its first row; ids count from 0 in order of starting."""
        run_id = len(self.runs)
        self.runs[run_id] = RunFacts(facts)
        return run_id

    def add_table(self, name: str) -> Table:
        """Add a table that the schema does not know, without columns."""
        table = self.tables[name] = Table(name, (), self.text_pool)
        return table

    def let_go_of_rows(self, folder: Path) -> None:
        """Drop all rows, keeping the facts of runs. The rows must be in a folder, and no thread may
        write or read them meanwhile."""
        self.take_rows(TraceStore())
        self.rows_in = folder

    def take_rows(self, other: TraceStore) -> None:
        """Take the rows of another store: the same trace, read again."""
        self._hold(other.text_pool, other.tables)
        self.pieces = other.pieces
        self.rows_in = None

    def n_bytes(self) -> int:
        """Memory taken by rows, bytes."""
        return sum(table.n_bytes() for table in self.tables.values())

    def unknown_columns(self) -> dict[str, tuple[str, ...]]:
        """Columns of an opened trace that the schema does not know, by table."""
        known = {name: {column.name for column in columns} for name, columns in TABLES.items()}
        found = {
            name: tuple(c.name for c in table.columns if c.name not in known.get(name, ()))
            for name, table in self.tables.items()
        }
        return {name: columns for name, columns in found.items() if columns}

    def size(self) -> int:
        """Rows in all tables, filled cells, and requests to other engines, some of which have no
        rows; it grows with every write, so an equal size means nothing new."""
        n_requests = sum(len(facts.get("requests") or ()) for facts in list(self.runs.values()))
        return n_requests + sum(len(table) + table.n_filled for table in self.tables.values())


def _blank(column: Column) -> int | float:
    """The value of a cell that was not observed: 0 (the empty text), MISSING or NaN."""
    if column.kind == "text":
        return 0
    whole = column.kind == "int" or (column.kind == "tops" and column.is_whole)
    return MISSING if whole else np.nan


def _empty(column: Column, capacity: int) -> np.ndarray:
    """An uninitialised array for `capacity` rows of a column."""
    if column.kind == "tops":
        return np.empty((capacity, N_TOP), np.int32 if column.is_whole else np.float32)
    return np.empty(capacity, _DTYPES[column.kind])


def _observed(value: int | float) -> int | float | None:
    return None if value == MISSING or value != value else value
