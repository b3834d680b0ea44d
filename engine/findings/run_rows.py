"""The trace of one run as rules read it: columns of its own rows, and its place among lanes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from engine.trace.records import MISSING, NOISE, REFERENCE
from engine.trace.round_rows import RoundRows
from engine.trace.store import Table, TextPool, TraceStore
from engine.trace.verdict import noise_bound

POLICY = "policy"
"""Kind of the lanes that verify drafts and roll back."""


class RunColumns:
    """The rows of one run in one table; columns are cut out when they are asked for."""

    def __init__(self, table: Table, run_id: int, pool: TextPool) -> None:
        self._table, self._n, self._pool = table, len(table), pool
        mine = np.flatnonzero(table.column("run_id", 0, self._n) == run_id)
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
        codes = [self._pool.find(value) for value in values]
        return np.isin(self[name], codes)

    def by_sequence(self, chosen: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Per sequence with chosen rows (bool [n]): its id and their indices, in order."""
        rows = np.flatnonzero(chosen)
        seqs = self["seq_id"][rows]
        order = np.argsort(seqs, kind="stable")
        starts = np.flatnonzero(np.diff(seqs[order], prepend=-1))
        for part in np.split(rows[order], starts[1:]) if rows.size else ():
            yield int(self["seq_id"][part[0]]), part


class ExaminedRun:
    """One run. lane: its name in a comparison, kind: reference, noise or policy; both "" for a
    run on its own."""

    def __init__(self, trace: TraceStore, run_id: int) -> None:
        self.trace, self.run_id = trace, run_id
        self.facts = trace.runs[run_id]
        self.lane, self.kind = str(self.facts.get("lane", "")), _kind(self.facts)

    @cached_property
    def rounds(self) -> RunColumns:
        return self._rows(self.trace.rounds)

    @cached_property
    def tokens(self) -> RunColumns:
        return self._rows(self.trace.tokens)

    @cached_property
    def asked(self) -> RunColumns:
        """Drafters that were asked."""
        return self._rows(self.trace.drafts)

    @cached_property
    def ubatches(self) -> RunColumns:
        return self._rows(self.trace.ubatches)

    @cached_property
    def memory(self) -> RunColumns:
        return self._rows(self.trace.memory)

    @cached_property
    def divergence(self) -> RunColumns:
        return self._rows(self.trace.divergence)

    @cached_property
    def states(self) -> RunColumns:
        """Errors of states by layer."""
        return self._rows(self.trace.states)

    def _rows(self, table: Table) -> RunColumns:
        return RunColumns(table, self.run_id, self.trace.text_pool)

    @cached_property
    def is_later(self) -> np.ndarray:
        """Rows of `rounds` behind the prompt of their sequence: bool [n]."""
        n = self.rounds.n  # the table may have grown
        return ~RoundRows.select(self.trace.rounds, self.run_id, None).is_prompt[:n]

    def option(self, *path: str) -> Any:
        """An option in effect, such as option("spec", "n_min"); None if it was not recorded."""
        value: Any = self.facts.get("options")
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    @cached_property
    def lanes(self) -> list[int]:
        """The runs of the comparison that this run is a lane of, the reference first."""
        if not self.lane:
            return []
        names = [str(facts.get("lane", "")) for facts in list(self.trace.runs.values())]
        start = self.run_id
        while names[start] != REFERENCE and start and names[start - 1]:
            start -= 1
        stop = start + 1
        while stop < len(names) and names[stop] not in ("", REFERENCE):
            stop += 1
        return list(range(start, stop))

    @cached_property
    def noise_runs(self) -> list[int]:
        """The noise lanes of that comparison that are measured as this lane is."""
        mine = self.facts.get("lane_against")
        return [
            i
            for i in self.lanes
            if _kind(facts := self.trace.runs[i]) == NOISE and facts.get("lane_against") == mine
        ]

    @cached_property
    def bound(self) -> float | None:
        """NMSE that the noise lane explains, None where there is no noise lane to tell."""
        return noise_bound(self.trace, self.noise_runs) if self.noise_runs else None

    @property
    def non_finite(self) -> list[dict[str, Any]]:
        """Rows of logits that were not finite, as engine.decode.verify notes them."""
        rows = self.facts.get("non_finite")
        named = {"round": int, "seq_id": int, "pos": int, "where": str, "what": str}
        return [
            row
            for row in (rows if isinstance(rows, list) else ())
            if isinstance(row, dict)
            and all(isinstance(row.get(name), kind) for name, kind in named.items())
        ]

    @cached_property
    def drafts(self) -> bool:
        """Whether drafts are this run's to answer for. Lanes share theirs: the first one stands
        for all; the reference and noise lanes do not verify any."""
        if not self.lane:
            return bool(self.option("spec", "types"))
        policy = (i for i in self.lanes if _kind(self.trace.runs[i]) == POLICY)
        return next(policy, None) == self.run_id


def _kind(facts: dict[str, Any]) -> str:
    lane = str(facts.get("lane", ""))
    plain = lane if lane in ("", REFERENCE, NOISE) else POLICY
    return str(facts.get("lane_kind", plain))


def observed(values: np.ndarray) -> np.ndarray:
    """Which values of an integer column were observed (not MISSING): bool [n]."""
    return values != MISSING


def round_keys(rows: RunColumns) -> np.ndarray:
    """A number for each row's round and sequence, to find them in another table: int64 [n]."""
    return (rows["round"] << 16) | rows["seq_id"]


def rounds_text(rounds: np.ndarray) -> str:
    """A list of round numbers [n] as short text, for a finding's evidence."""
    first, last = int(rounds[0]), int(rounds[-1])
    if len(rounds) == 1:
        return f"round {first}"
    return f"{len(rounds)} rounds, the first {first}, the last {last}"
