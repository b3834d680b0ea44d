"""Columns of a run, and the rows of `rounds` that figures are computed from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.trace.records import MISSING, PHASES
from engine.trace.store import Table, TraceStore


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


def paired(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """One number for each pair, int64 [n]; low: below 2 ** 31."""
    return (high.astype(np.int64) << 31) + low


def round_keys(rows: RunColumns) -> np.ndarray:
    """One number for the round and the sequence of each row, int64 [n]."""
    return paired(rows["round"], rows["seq_id"])


def places_of(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Index of the first key that equals each wanted number, int64; -1 where none does."""
    if not len(keys):
        return np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    at = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
    return np.where(keys[at] == wanted, at, -1)


@dataclass(frozen=True, slots=True)
class RoundRows:
    """The chosen rows of `rounds`, [n] each, in the order they were written.

    is_prompt: bool [n]. first, prompt_end, last: row indices of each sequence's first row, last
    prompt row and last row, sequences in the same order: [n sequences].
    """

    run_id: np.ndarray
    t_ms: np.ndarray
    verify_ms: np.ndarray
    pos0: np.ndarray
    num_drafted: np.ndarray
    num_accepted: np.ndarray
    num_target: np.ndarray
    num_emitted: np.ndarray
    rollback_depth: np.ndarray
    verify_width: np.ndarray
    n_merged: np.ndarray
    phases: dict[str, np.ndarray]
    is_prompt: np.ndarray
    first: np.ndarray
    prompt_end: np.ndarray
    last: np.ndarray

    @classmethod
    def select(cls, table: Table, run_id: int | None, seq_id: int | None) -> RoundRows:
        n = len(table)  # the table may grow meanwhile
        chosen = np.ones(n, bool)
        if run_id is not None:
            chosen &= table.column("run_id", 0, n) == run_id
        if seq_id is not None:
            chosen &= table.column("seq_id", 0, n) == seq_id

        rows: slice | np.ndarray = slice(None) if chosen.all() else chosen

        def pick(name: str) -> np.ndarray:
            return table.column(name, 0, n)[rows]

        def milliseconds(name: str) -> np.ndarray:
            return np.nan_to_num(pick(name), posinf=0.0, neginf=0.0)

        runs = pick("run_id")
        drafted, emitted = pick("num_draft_tokens"), pick("num_emitted")
        sequences = (runs << 32) + pick("seq_id")
        order = np.argsort(sequences, kind="stable")
        _, starts, counts = np.unique(sequences[order], return_index=True, return_counts=True)
        is_prompt = np.empty(len(order), bool)
        is_prompt[order] = _is_prompt(drafted[order], emitted[order] > 0, starts, counts)
        prompt_rows = np.where(is_prompt[order], np.arange(len(order)), -1)
        prompt_end = np.maximum.reduceat(prompt_rows, starts) if len(starts) else starts
        return cls(
            run_id=runs,
            t_ms=milliseconds("t_ms"),
            verify_ms=milliseconds("verify_ms"),
            pos0=pick("pos0"),
            num_drafted=drafted,
            num_accepted=pick("num_accepted_draft_tokens"),
            num_target=pick("num_target_tokens"),
            num_emitted=emitted,
            rollback_depth=pick("rollback_depth"),
            verify_width=pick("verify_width"),
            n_merged=pick("n_merged"),
            phases={phase: pick(f"{phase}_ms") for phase in PHASES},
            is_prompt=is_prompt,
            first=order[starts],
            prompt_end=order[prompt_end],
            last=order[starts + counts - 1],
        )

    @property
    def has_draft(self) -> np.ndarray:
        """Rows after the prompt that drafted, several rounds in one row among them: bool [n]."""
        return (self.num_drafted > 0) & ~self.is_prompt

    @property
    def is_step(self) -> np.ndarray:
        """Rows that are one verification of a draft: bool [n]."""
        return self.has_draft & (self.n_merged == MISSING)


def _is_prompt(
    drafted: np.ndarray, emits: np.ndarray, starts: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """The first row of every sequence, and those without a draft count before it emits a token.

    Rows are sorted by sequence; starts, counts: where each sequence's are.
    """
    n_before = np.cumsum(emits) - emits
    found: np.ndarray = (n_before == np.repeat(n_before[starts], counts)) & (drafted == MISSING)
    found[starts] = True
    return found
