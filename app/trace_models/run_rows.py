"""The rows of one run in a table of the trace, found once and read where they are; the same by run
and sequence; the arrays that grow with them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from engine.trace.records import PHASES
from engine.trace.run_ref import RunRef
from engine.trace.step_sums import StepSums
from engine.trace.store import Table


class GrowingArray:
    """An array with room to spare; `values` is what has been added."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self._array: np.ndarray = np.empty(1024, dtype)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def values(self) -> np.ndarray:
        """A view of everything added, [n]."""
        return self._array[: self._n]

    def add(self, values: np.ndarray) -> None:
        """Append values [n]."""
        stop = self._n + len(values)
        if stop > len(self._array):
            grown = np.empty(max(stop, 2 * len(self._array)), self._array.dtype)
            grown[: self._n] = self.values
            self._array = grown
        self._array[self._n : stop] = values
        self._n = stop


class RowIndex:
    """Row numbers of some runs in one table, by run and sequence; `poll` reads new rows."""

    def __init__(self, table: Table, run_ids: Iterable[int]) -> None:
        self._table = table
        self._run_ids = tuple(run_ids)
        self._n_read = 0
        self._rows: dict[tuple[int, int], array[int]] = {}

    def poll(self) -> bool:
        """Read the rows appended since the last call; whether any belong to these runs."""
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


class RunRows:
    """Rows of a run, numbered from 0 in the order written, which is the order of rounds."""

    def __init__(self, run: RunRef, table: str) -> None:
        self.run, self.table = run, run.store.tables[table]
        self.rounds = GrowingArray(np.int64)
        self._rows = GrowingArray(np.int64)
        self._next = 0

    def __len__(self) -> int:
        return len(self._rows)

    def read(self) -> tuple[int, int]:
        """Read the rows appended since the last call; start and stop of this run's new ones."""
        start, stop, first = self._next, len(self.table), len(self._rows)
        self._next = stop
        rows = start + np.flatnonzero(self.table.column("run_id", start, stop) == self.run.run_id)
        self._rows.add(rows)
        self.rounds.add(self.table.column("round", 0, stop)[rows])
        return first, len(self._rows)

    def between(self, first_round: int, stop_round: int) -> tuple[int, int]:
        """Start and stop of the rows of rounds first_round .. stop_round - 1."""
        start, stop = np.searchsorted(self.rounds.values, (first_round, stop_round))
        return int(start), int(stop)

    def column(self, name: str, start: int, stop: int) -> np.ndarray:
        """Values of a column in rows start..stop of the run, [stop - start]."""
        rows = self._rows.values[start:stop]
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1:  # side by side: no copy
            return self.table.column(name, int(rows[0]), int(rows[-1]) + 1)
        values: np.ndarray = self.table.column(name)[rows]
        return values

    def texts(self, name: str, start: int, stop: int) -> list[str]:
        """A text column of rows start..stop."""
        return [self.table.texts(name, row, row + 1)[0] for row in self._rows.values[start:stop]]

    def row(self, index: int) -> dict[str, object]:
        """One row as Python values; not observed is None."""
        return self.table.row(int(self._rows.values[index]))

    def add_to(self, sums: StepSums, start: int, stop: int) -> np.ndarray:
        """Take rows start..stop, of `rounds`, into sums; which of them are steps, bool [n]."""
        return sums.add(
            self.column("seq_id", start, stop),
            self.column("num_draft_tokens", start, stop),
            self.column("num_accepted_draft_tokens", start, stop),
            self.column("verify_width", start, stop),
            {phase: self.column(f"{phase}_ms", start, stop) for phase in PHASES},
        )

    def seq_in(self, round_: int | None) -> int | None:
        """The first sequence that has a row in a round, or in any; None without one."""
        start, stop = (0, len(self)) if round_ is None else self.between(round_, round_ + 1)
        return None if start == stop else int(self.column("seq_id", start, start + 1)[0])

    def listed(self, names: Sequence[str], first_round: int, stop_round: int) -> list[list[object]]:
        """The named columns of all rows of these rounds, row by row; not observed is None."""
        rows = map(self.row, range(*self.between(first_round, stop_round)))
        return [[row[name] for name in names] for row in rows]
