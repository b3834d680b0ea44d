"""How rows come into a store: every source of runs writes through a TraceWriter.

A *source* is whatever makes a run happen or reads one: this engine, a server, a library in the
process, a file in another format. It begins a run with what it knows of it, appends rows and ends
the run. Views, findings and export read the store and cannot tell one source from another. Numpy
and the standard library are enough to be a source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import to_builtins

from engine.environment import version
from engine.trace.facts import SourceFacts
from engine.trace.records import COLUMN_STATES, TABLES
from engine.trace.store import TraceStore
from engine.trace.timings import summary

FAILED = "failed"
"""The stop of a sequence whose run ended with an error."""


def this_engine() -> SourceFacts:
    """The source of runs that this program decodes itself."""
    return SourceFacts("draftscope", version())


class TraceWriter:
    """Writes one run of a store, from one thread.

    Facts that every run has: `source` (engine and version); once it is over `summary` (figures)
    and `stops` (why each sequence ended); `error` if it failed. Anyone who reads `stops` finds all
    rows and figures in place.
    """

    def __init__(self, store: TraceStore, run_id: int) -> None:
        """Go on with a run that was started before."""
        self.store, self.run_id = store, run_id
        self.facts = store.runs[run_id]

    @classmethod
    def begin(
        cls,
        store: TraceStore,
        source: SourceFacts,
        facts: Mapping[str, Any],
        *,
        columns: Mapping[str, Mapping[str, str]] | None = None,
    ) -> TraceWriter:
        """Register a run. facts: JSON-able, what is known before the first row.

        columns: by table and column, one of COLUMN_STATES where it is not plain from the rows: a
        column is taken as observed where it has values, and as absent where it has none. Raises
        ValueError for a table, column or state that does not exist.
        """
        known = dict(facts) | {"source": to_builtins(source)}
        if columns:
            _check_columns(columns)
            known["columns"] = {table: dict(states) for table, states in columns.items()}
        return cls(store, store.begin_run(known))

    def append(self, table: str, **values: Any) -> None:
        """Add one row to a table; what is not named, or None, is not observed.

        Values as engine.trace.records tells: int, float, str, up to N_TOP of them for "tops".
        """
        self.store.tables[table].append(run_id=self.run_id, **values)

    def append_rows(self, table: str, names: Sequence[str], rows: Sequence[Any]) -> None:
        """Add rows to a table: values of these columns, row after row."""
        self.extend(table, {name: rows[i :: len(names)] for i, name in enumerate(names)})

    def extend(self, table: str, columns: Mapping[str, Sequence[Any] | np.ndarray]) -> None:
        """Add many rows from columns of equal length, [n] each; see Table.extend."""
        self.store.tables[table].extend(columns, run_id=self.run_id)

    def learn(self, tokens: Iterable[int], piece: Callable[[int], bytes]) -> None:
        """Keep the bytes of tokens that rows name; `piece` is asked for new ones only."""
        pieces = self.store.pieces
        for token in tokens:
            if token not in pieces:
                pieces[token] = piece(token)

    def set_facts(self, **facts: Any) -> None:
        """Add facts of the run; one that is there already is replaced."""
        self.facts.update(facts)

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return "stops" in self.facts

    def end(self, stops: Sequence[str]) -> None:
        """The run is over. stops: for each sequence end, limit, context, grammar, stopped or what
        the source calls it. The first end counts; later ones change nothing."""
        if not self.ended:
            self.facts.summary = summary(self.store, self.run_id)
            self.facts.stops = list(stops)

    def fail(self, error: str) -> None:
        """The run is over because of an error, which is kept next to an end that was reported
        before. The first error counts."""
        self.facts.setdefault("error", error)
        self.end([FAILED])


def _check_columns(columns: Mapping[str, Mapping[str, str]]) -> None:
    for table, states in columns.items():
        known = {column.name for column in TABLES.get(table, ())}
        for name, state in states.items():
            if name not in known or state not in COLUMN_STATES:
                raise ValueError(
                    f"{table}.{name}: {state!r} is not a state of a column of the trace"
                )
