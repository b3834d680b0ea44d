"""One round of one sequence: every row of the trace that belongs to it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from app.trace_models.position import Position
from app.trace_models.token_text import line_text, row_text
from engine.trace.run_ref import RunRef
from engine.trace.store import Table, TraceStore

TraceRow = dict[str, Any]
"""A row by column name; None is not observed."""


@dataclass(frozen=True)
class Step:
    """The rows of one round: of `rounds`, and those of the other tables that go with it.

    tokens: what was drafted in order, then the target's own; replayed rows repeat a token and
    prompt tokens are not judged, so both are only counted. drafts: one for each drafter asked.
    ubatches: those whose passes decoded this sequence.
    """

    store: TraceStore
    row: TraceRow
    tokens: tuple[TraceRow, ...]
    drafts: tuple[TraceRow, ...]
    ubatches: tuple[TraceRow, ...]
    n_prompt: int
    n_replayed: int

    @property
    def round(self) -> int:
        return int(self.row["round"])

    @property
    def seq_id(self) -> int:
        return int(self.row["seq_id"])

    @cached_property
    def title(self) -> str:
        """Which round of which sequence this is."""
        return f"Round {self.round:,} · sequence {self.seq_id}"

    def is_derived(self, column: str) -> bool:
        """Whether a value of `row` was derived from what the engine reported."""
        columns = self.store.runs[self.row["run_id"]].columns
        states = columns.get("rounds") if isinstance(columns, dict) else None
        return isinstance(states, dict) and states.get(column) == "derived"

    def is_at(self, position: Position) -> bool:
        """Whether a position lies in this round."""
        return (self.seq_id, self.round) == (position.seq_id, position.round)

    def text(self, token_id: int) -> str:
        """A token as a reader sees it, in one line; spaces alone have a mark each."""
        return line_text(self.store.pieces.get(token_id, b""), token_id)

    def text_of(self, token: TraceRow) -> str:
        """The same for one of `tokens`, whose id may not be known."""
        return row_text(self.store, token)


def read_step(run: RunRef, seq_id: int, round_: int) -> Step | None:
    """Read a round of one sequence; None where the run has no such round."""
    store, run_id = run.store, run.run_id
    rows = _rows(store.rounds, run_id, round_, seq_id)
    if not len(rows):
        return None
    token_rows = _rows(store.tokens, run_id, round_, seq_id)
    kinds = store.text_pool.decode(store.tokens.column("kind")[token_rows])
    shown = [
        int(row)
        for row, kind in zip(token_rows, kinds, strict=True)
        if kind not in ("prompt", "replayed")
    ]
    passes = (store.ubatches.row(int(row)) for row in _rows(store.ubatches, run_id, round_, None))
    return Step(
        store,
        store.rounds.row(int(rows[-1])),
        tuple(store.tokens.row(row) for row in shown),
        tuple(store.drafts.row(int(r)) for r in _rows(store.drafts, run_id, round_, seq_id)),
        tuple(one for one in passes if str(seq_id) in one["seq_ids"].split()),
        kinds.count("prompt"),
        kinds.count("replayed"),
    )


def newest_round(run: RunRef) -> tuple[int, int] | None:
    """(sequence, round) of the last row of a run, None without any."""
    table, n = run.store.rounds, len(run.store.rounds)
    rows = np.flatnonzero(table.column("run_id", 0, n) == run.run_id)
    if not len(rows):
        return None
    seq_id, round_ = (table.column(name)[rows[-1]] for name in ("seq_id", "round"))
    return int(seq_id), int(round_)


def neighbour(run: RunRef, seq_id: int, round_: int, step: int) -> int | None:
    """The next (+1) or previous (-1) round that a sequence took part in, None beyond its ends."""
    table, n = run.store.rounds, len(run.store.rounds)
    mine = table.column("run_id", 0, n) == run.run_id
    mine &= table.column("seq_id", 0, n) == seq_id
    rounds = table.column("round", 0, n)[mine]
    others = rounds[rounds > round_] if step > 0 else rounds[rounds < round_]
    if not len(others):
        return None
    return int(others.min() if step > 0 else others.max())


def _rows(table: Table, run_id: int, round_: int, seq_id: int | None) -> np.ndarray:
    n = len(table)  # the table may grow meanwhile
    chosen = table.column("round", 0, n) == round_
    chosen &= table.column("run_id", 0, n) == run_id
    if seq_id is not None:
        chosen &= table.column("seq_id", 0, n) == seq_id
    return np.flatnonzero(chosen)
