"""Rows of a table by run and sequence, found as the table grows."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from engine.trace.store import Table


class RowIndex:
    """Where the rows of some runs are; `poll` takes in what was appended since."""

    def __init__(self, table: Table, run_ids: Iterable[int]) -> None:
        self._table = table
        self._run_ids = tuple(run_ids)
        self._n_read = 0
        self._rows: dict[tuple[int, int], array[int]] = {}

    def poll(self) -> bool:
        """Look at the new rows; whether any belong to these runs."""
        start, stop = self._n_read, len(self._table)
        self._n_read = stop
        runs = self._table.column("run_id", start, stop)
        seq_ids = self._table.column("seq_id", start, stop)
        found = False
        for run_id in self._run_ids:
            mine = np.flatnonzero(runs == run_id)
            for seq_id in np.unique(seq_ids[mine]).tolist():
                rows = mine[seq_ids[mine] == seq_id] + start
                kept = self._rows.setdefault((run_id, seq_id), array("q"))
                kept.frombytes(rows.astype(np.int64).tobytes())
                found = True
        return found

    def seq_ids(self) -> list[int]:
        """The sequences seen."""
        return sorted({seq_id for _, seq_id in self._rows})

    def rows(self, run_id: int, seq_id: int) -> np.ndarray:
        """Row numbers, int64 [n] ascending."""
        return np.array(self._rows.get((run_id, seq_id), ()), np.int64)

    def column(self, run_id: int, seq_id: int, name: str) -> np.ndarray:
        """One column of one sequence of a run, [n]."""
        return self._table.column(name, 0, self._n_read)[self.rows(run_id, seq_id)]
