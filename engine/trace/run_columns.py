"""The columns of one run in a table of the trace."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.trace.store import TraceStore


class RunColumns:
    """The rows of one run in one table, as many as there are now, n; columns are cut out when they
    are asked for."""

    def __init__(self, store: TraceStore, table: str, run_id: int) -> None:
        self._table, self._pool = store.tables[table], store.text_pool
        self._n = len(self._table)
        mine = np.flatnonzero(self._table.column("run_id", 0, self._n) == run_id)
        self._mine: slice | np.ndarray = mine
        if mine.size and int(mine[-1]) - int(mine[0]) + 1 == mine.size:
            self._mine = slice(int(mine[0]), int(mine[-1]) + 1)
        self._columns: dict[str, np.ndarray] = {}
        self.n = int(mine.size)

    def __getitem__(self, name: str) -> np.ndarray:
        """One column; text columns give codes."""
        if name not in self._columns:
            self._columns[name] = self._table.column(name, 0, self._n)[self._mine]
        return self._columns[name]

    def texts(self, name: str, rows: np.ndarray) -> list[str]:
        """Some rows of a text column."""
        return self._pool.decode(self[name][rows])

    def is_text(self, name: str, *values: str) -> np.ndarray:
        """Which rows of a text column hold one of the given texts: bool [n]."""
        held = [self[name] == self._pool.find(value) for value in values]
        return np.logical_or.reduce(held)

    def by_sequence(self, chosen: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Per sequence with chosen rows (bool [n]): its id and their indices, in order."""
        rows = np.flatnonzero(chosen)
        seqs = self["seq_id"][rows]
        order = np.argsort(seqs, kind="stable")
        starts = np.flatnonzero(np.diff(seqs[order], prepend=-1))
        for part in np.split(rows[order], starts[1:]) if rows.size else ():
            yield int(self["seq_id"][part[0]]), part
