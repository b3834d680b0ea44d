"""References to runs by trace and number, the columns of a run, and traces made of selected
runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from msgspec.structs import replace

from engine.trace.facts import RunFacts
from engine.trace.records import MISSING, REFERENCE
from engine.trace.store import TraceStore


@dataclass(frozen=True, slots=True)
class RunRef:
    """A run and the trace that holds it; ids count from 0 in every trace, so an id alone is
    ambiguous. Equal for the same run of the same store."""

    store: TraceStore
    run_id: int

    @property
    def facts(self) -> RunFacts:
        """The facts of the run. Raises KeyError if the trace has no such run."""
        return self.store.runs[self.run_id]

    @property
    def ended(self) -> bool:
        """Whether the run has ended; that fact is set last."""
        return "stops" in self.facts

    @property
    def forced(self) -> list[tuple[int, int, int]]:
        """Tokens forced in this fork or its ancestors: sequence, round, id."""
        run, found = self, []
        while (fork := run.facts.fork) is not None:
            if fork.token is not None:
                found.append((fork.seq_id, fork.round - 1, fork.token))
            if fork.parent not in self.store.runs or fork.parent >= run.run_id:
                break  # a fork comes later than its parent
            run = self.sibling(fork.parent)
        return found

    def sibling(self, run_id: int) -> RunRef:
        """Another run of the same trace."""
        return RunRef(self.store, run_id)

    def __str__(self) -> str:
        return f"run {self.run_id}"


def comparison_of(store: TraceStore, run_id: int) -> range:
    """The runs of the comparison that a run is a lane of, reference first if present; empty for a
    run on its own."""
    names = [facts.lane or "" for facts in list(store.runs.values())]
    start = stop = run_id
    while 0 < start < len(names) and names[start] not in ("", REFERENCE) and names[start - 1]:
        start -= 1
    while stop < len(names) and names[stop] and (names[stop] != REFERENCE or stop == start):
        stop += 1
    return range(start, stop)


def same_model(one: Any, other: Any) -> bool:
    """Whether two identities (GgufFile.identity, possibly with `draft`) mean the same model.

    The file headers must be equal. For tensors, `content` decides if known for both, else file name
    and modification time.
    """
    if not isinstance(one, dict) or not isinstance(other, dict):
        return bool(one == other)
    names = ["size", "sha256"]
    names += ["content"] if one.get("content") and other.get("content") else ["name", "modified_ns"]
    drafts = one.get("draft"), other.get("draft")
    return all(one.get(name) == other.get(name) for name in names) and (
        drafts == (None, None) or same_model(*drafts)
    )


def trace_of(runs: Sequence[RunRef]) -> TraceStore:
    """A new trace with the rows and facts of these runs of one trace, renumbered from 0 in this
    order. References to runs that are not included are dropped. The runs may grow meanwhile: the
    rows present at the start are copied."""
    old, new = runs[0].store, TraceStore()
    numbers = {run.run_id: number for number, run in enumerate(runs)}
    sizes = {name: len(table) for name, table in old.tables.items()}
    for run in runs:
        new.begin_run(_facts(run.facts, numbers))
    new.pieces, new.more_facts = dict(old.pieces), dict(old.more_facts)
    for name, table in old.tables.items():
        copy = new.tables.get(name) or new.add_table(name)
        known = {column.name for column in copy.columns}
        for column in table.columns:
            if column.name not in known:
                copy.add_column(column)
        ids = table.column("run_id", 0, sizes[name]) if sizes[name] else np.zeros(0, np.int32)
        rows = np.flatnonzero(np.isin(ids, list(numbers)))
        if not rows.size:
            continue
        columns = {
            column.name: old.text_pool.decode(table.column(column.name, 0, sizes[name])[rows])
            if column.kind == "text"
            else table.column(column.name, 0, sizes[name])[rows]
            for column in table.columns
        }
        copy.extend(columns | {"run_id": [numbers[run_id] for run_id in ids[rows].tolist()]})
    return new


def copy_rounds(run: RunRef, run_id: int, stop: int) -> None:
    """Copy this run's rows of rounds before `stop` to another run of the trace: what decoding
    wrote, not later findings."""
    for name in ("rounds", "tokens", "drafts", "ubatches", "memory"):
        table = run.store.tables[name]
        is_copied = (table.column("run_id") == run.run_id) & (table.column("round") < stop)
        rows = np.flatnonzero(is_copied)
        if rows.size:
            columns = {column.name: table.column(column.name)[rows] for column in table.columns}
            table.extend(columns | {"run_id": np.full(rows.size, run_id)})


def _facts(facts: RunFacts, numbers: dict[int, int]) -> RunFacts:
    """Facts of a run with run ids renumbered."""
    found = RunFacts(facts)
    if (fork := facts.fork) is not None:
        parent = numbers.get(fork.parent)
        found.fork = None if parent is None else replace(fork, parent=parent)
    if (against := facts.lane_against) is not None:
        found.lane_against = numbers.get(against)
    return found


class RunColumns:
    """The current n rows of one run, or one of its sequences, in one table; columns are selected on
    access."""

    def __init__(
        self, store: TraceStore, table: str, run_id: int, seq_id: int | None = None
    ) -> None:
        self._table, self._pool = store.tables[table], store.text_pool
        self._n = len(self._table)
        chosen = self._table.column("run_id", 0, self._n) == run_id
        if seq_id is not None:
            chosen &= self._table.column("seq_id", 0, self._n) == seq_id
        self.n = int(np.count_nonzero(chosen))
        first = int(np.argmax(chosen)) if self.n else 0
        self._mine: slice | np.ndarray = slice(first, first + self.n)
        if not chosen[self._mine].all():
            self._mine = np.flatnonzero(chosen)
        self._columns: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        """One column; text columns give codes."""
        if name not in self._columns:
            self._columns[name] = self._table.column(name, 0, self._n)[self._mine]
        return self._columns[name]

    def has_values(self, name: str) -> bool:
        """Whether a column was observed in any of the rows."""
        values, blank = self[name], self._table.blank(name)
        return bool((values != blank if blank == blank else values == values).any())

    def texts(self, name: str, rows: np.ndarray) -> list[str]:
        """A text column as strings, for some rows."""
        return self._pool.decode(self[name][rows])

    def is_text(self, name: str, *values: str) -> np.ndarray:
        """Whether each row of a text column holds one of the given texts: bool [n]."""
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

    # -- of `rounds` ---------------------------------------------------------------------------

    @cached_property
    def is_prompt(self) -> np.ndarray:
        """A sequence's first row, and rows without a draft until it emits a token: bool [n]."""
        order, starts, counts = self._sequences
        emits, drafted = self["num_emitted"][order] > 0, self["num_draft_tokens"][order]
        n_before = np.cumsum(emits) - emits
        found = (n_before == np.repeat(n_before[starts], counts)) & (drafted == MISSING)
        found[starts] = True
        is_prompt = np.empty(self.n, bool)
        is_prompt[order] = found
        return is_prompt

    @property
    def has_draft(self) -> np.ndarray:
        """Rows after the prompt with drafts, including rows that sum up several rounds: bool
        [n]."""
        return (self["num_draft_tokens"] > 0) & ~self.is_prompt

    @property
    def is_step(self) -> np.ndarray:
        """Rows that are one verification of a draft: bool [n]."""
        return self.has_draft & (self["n_merged"] == MISSING)

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row indices of each sequence's first row, last prompt row and last row, sequences in the
        same order: [n sequences] each."""
        order, starts, counts = self._sequences
        prompt = np.where(self.is_prompt[order], np.arange(self.n), -1)
        prompt_end = np.maximum.reduceat(prompt, starts) if len(starts) else starts
        return order[starts], order[prompt_end], order[starts + counts - 1]

    @cached_property
    def _sequences(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row indices sorted by sequence, and each sequence's start and count among them."""
        order = np.argsort(self["seq_id"], kind="stable")
        _, starts, counts = np.unique(self["seq_id"][order], return_index=True, return_counts=True)
        return order, starts, counts


def paired(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """One number per pair, int64 [n]; low: below 2 ** 31."""
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


def rows_by_sequence(store: TraceStore, run_id: int, kinds: Sequence[str]) -> dict[int, np.ndarray]:
    """The rows of `tokens` of these kinds, int64 [n] in order, for every sequence that has any."""
    table, n = store.tokens, len(store.tokens)
    codes = [store.text_pool.find(kind) for kind in kinds]
    mine = table.column("run_id", 0, n) == run_id
    rows = np.flatnonzero(mine & np.isin(table.column("kind", 0, n), codes))
    seq_ids = table.column("seq_id", 0, n)[rows]
    return {seq_id: rows[seq_ids == seq_id] for seq_id in np.unique(seq_ids).tolist()}
