"""The trace writer, through which every source of runs writes.

A *source* makes a run or reads one: this engine, a server, an in-process library, a file in another
format. It begins a run with the facts known so far, appends rows and ends the run. Views, findings
and export read the store and treat all sources alike. A source needs only numpy and the standard
library.
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

    Facts that every run has: `source` (engine and version); at its end `summary` (figures) and
    `stops` (why each sequence ended); `error` if it failed. Once `stops` is set, all rows and
    figures are in place.
    """

    def __init__(self, store: TraceStore, run_id: int) -> None:
        """Continue a run that exists already."""
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
        """Register a run. facts: JSON-able, those known before the first row.

        columns: by table and column, one of COLUMN_STATES where the rows do not show it: by default
        a column with values is observed, and one without is absent. Raises ValueError for a table,
        column or state that does not exist.
        """
        known = dict(facts) | {"source": to_builtins(source)}
        if columns:
            _check_columns(columns)
            known["columns"] = {table: dict(states) for table, states in columns.items()}
        return cls(store, store.begin_run(known))

    def append(self, table: str, **values: Any) -> None:
        """Add one row to a table; missing or None values are not observed.

        Values as in engine.trace.records: int, float, str, up to N_TOP of them for "tops".
        """
        self.store.tables[table].append(run_id=self.run_id, **values)

    def append_rows(self, table: str, names: Sequence[str], rows: Sequence[Any]) -> None:
        """Add rows to a table: values of these columns, row after row."""
        self.extend(table, {name: rows[i :: len(names)] for i, name in enumerate(names)})

    def extend(self, table: str, columns: Mapping[str, Sequence[Any] | np.ndarray]) -> None:
        """Add many rows from columns of equal length, [n] each; see Table.extend."""
        self.store.tables[table].extend(columns, run_id=self.run_id)

    def learn(self, tokens: Iterable[int], piece: Callable[[int], bytes]) -> None:
        """Keep the bytes of tokens that rows contain; `piece` is called for new ones only."""
        pieces = self.store.pieces
        for token in tokens:
            if token not in pieces:
                pieces[token] = piece(token)

    def set_facts(self, **facts: Any) -> None:
        """Add facts of the run, replacing existing ones."""
        self.facts.update(facts)

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return "stops" in self.facts

    def end(self, stops: Sequence[str]) -> None:
        """End the run. stops: per sequence end, limit, context, grammar, stopped or the source's
        own reason. Only the first call has an effect."""
        if not self.ended:
            self.facts.summary = summary(self.store, self.run_id)
            self.facts.stops = list(stops)

    def fail(self, error: str) -> None:
        """End the run with an error, which is also kept if the run has already ended. The first
        error counts."""
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
