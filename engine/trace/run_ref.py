"""Runs of traces: a run named by trace and number, and a trace made of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from engine.trace.facts import RunFacts
from engine.trace.store import TraceStore


@dataclass(frozen=True, slots=True)
class RunRef:
    """A run together with the trace that holds it: ids count from 0 in every trace, so an id by
    itself names one run in each of them. Two are equal for the same run of the same store."""

    store: TraceStore
    run_id: int

    @property
    def facts(self) -> RunFacts:
        """The facts of the run in its trace. Raises KeyError for a run that the trace lacks."""
        return self.store.runs[self.run_id]

    @property
    def ended(self) -> bool:
        """Whether the run has come to its end; the trace keeps that fact for last."""
        return "stops" in self.facts

    @property
    def forced(self) -> list[tuple[int, int, int]]:
        """Tokens that this fork, or one that it comes of, was given in the place of the newest:
        sequence, round, id."""
        run, found = self, []
        while (fork := run.facts.fork) is not None:
            if fork.token is not None:
                found.append((fork.seq_id, fork.round - 1, fork.token))
            if fork.parent not in self.store.runs or fork.parent >= run.run_id:
                break  # a fork comes later than the run that it goes on from
            run = self.sibling(fork.parent)
        return found

    def sibling(self, run_id: int) -> RunRef:
        """Another run of the same trace."""
        return RunRef(self.store, run_id)

    def __str__(self) -> str:
        return f"run {self.run_id}"


def same_model(one: Any, other: Any) -> bool:
    """Whether two identities (GgufFile.identity, perhaps with `draft`) mean one model.

    The heads of the files have to be equal. Of the tensors, `content` decides where it is known
    of both; elsewhere the file's name and the time of its last change do.
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
    """A new trace with the rows and facts of these runs of one trace, numbered from 0 in this
    order. A fork or lane of a run that is not among them does not name it any more. The runs may
    grow meanwhile: the rows present at the start are in it."""
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
    """Give another run of the trace the rows of this one's rounds before `stop`: what decoding has
    written, not what was found out later."""
    for name in ("rounds", "tokens", "drafts", "ubatches", "memory"):
        table = run.store.tables[name]
        is_copied = (table.column("run_id") == run.run_id) & (table.column("round") < stop)
        rows = np.flatnonzero(is_copied)
        if rows.size:
            columns = {column.name: table.column(column.name)[rows] for column in table.columns}
            table.extend(columns | {"run_id": np.full(rows.size, run_id)})


def _facts(facts: RunFacts, numbers: dict[int, int]) -> RunFacts:
    """Facts of a run, with the new numbers of others in them."""
    found = RunFacts(facts)
    if (fork := facts.fork) is not None:
        parent = numbers.get(fork.parent)
        found.fork = None if parent is None else replace(fork, parent=parent)
    if (against := facts.lane_against) is not None:
        found.lane_against = numbers.get(against)
    return found
