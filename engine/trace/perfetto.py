"""Perfetto export, through its package (the extra `perfetto`): a process per run, a track per
sequence with its rounds, a sub-track per phase, counters, and a flow from each draft to its
verdict.

A row of `rounds` gives the end of its round and the duration of each phase for its sequence, but
not when a phase began. So phases are placed one after another in the order of a round, the last one
ending with the round; a round is as long as its phases, or `total_ms` if those are unknown.
Sequences decoded together each have their share of a phase. A round that would begin before the end
of the previous one begins there; its columns are in its arguments, unchanged. Rows without times
are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import OptionError, TraceFileError
from engine.files import written_whole
from engine.trace.records import MISSING, TABLES
from engine.trace.run_ref import RunColumns, RunRef

_ORDER = ("draft", "save", "verify", "sample", "rollback", "restore", "replay")
"""Phases in the order of a round."""
_SEQUENCE_ID = 1
_CLEARED = 1
"""TracePacket.SEQ_INCREMENTAL_STATE_CLEARED."""
_IN_USE = ("live", "fresh", "carried", "pending")
"""State of a snapshot plane that may be read."""
_COUNTERS = {
    "rollback depth": ("rollback_depth", "tokens"),
    "kv cells": ("kv_cells_used", "cells"),
    "memory held": ("memory_bytes_held", "bytes"),
}


def new_builder() -> Any:
    """The package's trace builder. Raises OptionError if it is not installed."""
    try:
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder
    except ImportError as error:
        raise OptionError(
            "Perfetto traces need the package perfetto, which is not installed.",
            "Install it: pip install 'draftscope[perfetto]'.",
        ) from error
    return TraceProtoBuilder()


def write_perfetto(runs: Sequence[RunRef], path: Path) -> int:
    """Write the file, replacing an earlier one; returns the number of events.

    Raises OptionError without the package perfetto or write access, TraceFileError if no round has
    a time.
    """
    events = _Events(new_builder())
    for run in runs:
        _add_run(events, run)
    if not events.n_timed:
        raise TraceFileError(
            "No round of these runs has a time.",
            "Use a run of an engine that reports the times of its rounds.",
        )
    with written_whole(path) as part:
        part.write_bytes(events.in_order())
    return events.n_timed


class _Events:
    """Packets of a trace: tracks, numbered from 1, and their events."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._n_tracks = self.n_timed = self.n_flows = 0

    def in_order(self) -> bytes:
        """The serialised trace, packets sorted by time."""
        packets = self._builder.trace.packet
        packets.sort(key=lambda one: one.timestamp)
        next(one for one in packets if one.HasField("timestamp")).sequence_flags = _CLEARED
        serialized: bytes = self._builder.serialize()
        return serialized

    def track(self, name: str, parent: int | None = None, **more: Any) -> int:
        self._n_tracks += 1
        above = {} if parent is None else {"parent_uuid": parent}
        described = {"uuid": self._n_tracks, "name": name, **above, **more}
        _set(self._packet().track_descriptor, described)
        return self._n_tracks

    def slice(
        self,
        track: int,
        start_ns: int,
        end_ns: int,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        begins: Sequence[int] = (),
        ends: Sequence[int] = (),
    ) -> None:
        """Add a slice. begins, ends: flows that start here, and flows that end here."""
        event = self._event(track, start_ns)
        event.type, event.name = event.TYPE_SLICE_BEGIN, name
        event.flow_ids.extend(begins)
        event.terminating_flow_ids.extend(ends)
        for key, value in (arguments or {}).items():
            argument = event.debug_annotations.add()
            kinds = {str: "string_value", int: "int_value"}
            argument.name = key
            setattr(argument, kinds.get(type(value), "double_value"), value)
        event = self._event(track, end_ns)
        event.type = event.TYPE_SLICE_END

    def count(self, track: int, at_ns: int, value: float) -> None:
        event = self._event(track, at_ns)
        event.type, event.double_counter_value = event.TYPE_COUNTER, value

    def _packet(self) -> Any:
        packet = self._builder.add_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE_ID
        return packet

    def _event(self, track: int, at_ns: int) -> Any:
        self.n_timed += 1
        packet = self._packet()
        packet.timestamp, packet.track_event.track_uuid = at_ns, track
        return packet.track_event


def _set(message: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            getattr(message, name).SetInParent()
            _set(getattr(message, name), value)
        else:
            setattr(message, name, value)


def _add_run(events: _Events, run: RunRef) -> None:
    table = RunColumns(run.store, "rounds", run.run_id)
    drafters = ", ".join(run.facts.options.spec.types) if run.facts.options else ""
    name = " · ".join(filter(None, (str(run), run.facts.lane, drafters)))
    process = events.track("", process={"pid": run.run_id + 1, "process_name": name})
    for seq_id, rows in table.by_sequence(np.isfinite(table["t_ms"])):
        occupancy = _planes_in_use(run, seq_id)
        _Sequence(events, process, seq_id).add(list(_rows(table, rows)), occupancy)


def _rows(table: RunColumns, rows: np.ndarray) -> Iterator[dict[str, Any]]:
    """Rows as Python values, without unobserved ones."""
    columns = {}
    for column in TABLES["rounds"]:
        if column.kind == "text":
            columns[column.name] = table.texts(column.name, rows)
        else:
            columns[column.name] = table[column.name][rows].tolist()
    for i in range(len(rows)):
        row = {name: values[i] for name, values in columns.items()}
        yield {
            name: value
            for name, value in row.items()
            if value not in ("", MISSING) and value == value
        }


def _planes_in_use(run: RunRef, seq_id: int) -> dict[int, int]:
    """By round: snapshot planes of a sequence that hold a state."""
    table = RunColumns(run.store, "memory", run.run_id)
    mine = table["seq_id"] == seq_id
    rounds, numbers = np.unique(table["round"][mine], return_inverse=True)
    used = np.bincount(numbers, table.is_text("state", *_IN_USE)[mine], len(rounds))
    return dict(zip(rounds.tolist(), used.astype(int).tolist(), strict=True))


class _Sequence:
    """The tracks of one sequence."""

    def __init__(self, events: _Events, process: int, seq_id: int) -> None:
        self._events, self._name = events, f"sequence {seq_id}"
        self._rounds = events.track(self._name, process)
        self._below: dict[str, int] = {}

    def _phase(self, phase: str) -> int:
        if phase not in self._below:
            self._below[phase] = self._events.track(phase, self._rounds)
        return self._below[phase]

    def _counter(self, name: str, unit: str) -> int:
        if name not in self._below:
            counter = {"unit_name": unit}
            self._below[name] = self._events.track(name, self._rounds, counter=counter)
        return self._below[name]

    def add(self, rows: Sequence[Mapping[str, Any]], occupancy: Mapping[int, int]) -> None:
        """rows: of `rounds`, in order, each with its t_ms."""
        before, drafted, accepted = 0, 0, 0
        for row in rows:
            end = max(round(row["t_ms"] * 1e6), before)
            self._add_round(row, end, before)
            before = end
            for name, (column, unit) in _COUNTERS.items():
                if column in row:
                    self._events.count(self._counter(name, unit), end, row[column])
            if row["round"] in occupancy:
                track = self._counter("planes in use", "planes")
                self._events.count(track, end, occupancy[row["round"]])
            if row.get("num_draft_tokens") and "num_accepted_draft_tokens" in row:
                drafted += row["num_draft_tokens"]
                accepted += row["num_accepted_draft_tokens"]
                self._events.count(self._counter("acceptance", "rate"), end, accepted / drafted)

    def _add_round(self, row: Mapping[str, Any], end: int, before: int) -> None:
        """Add one round. end, before: end times of this round and of the previous one, ns."""
        phases = {one: round(row[f"{one}_ms"] * 1e6) for one in _ORDER if row.get(f"{one}_ms")}
        length = sum(phases.values()) or round(row.get("total_ms", 0.0) * 1e6)
        start = max(end - length, before)
        shown = {name: value for name, value in row.items() if name not in ("run_id", "seq_id")}
        n, good = row.get("num_draft_tokens"), row.get("num_accepted_draft_tokens")
        verdict = f": {good} of {n} accepted" if n and good is not None else ""
        self._events.slice(
            self._rounds, start, end, f"round {row['round']}{verdict}", arguments=shown
        )
        flow: tuple[int, ...] = ()
        if n and "draft" in phases and {"verify", "sample"} & set(phases):
            self._events.n_flows += 1
            flow = (self._events.n_flows,)
        last = "sample" if "sample" in phases else "verify"
        at = start
        for phase, ns in phases.items():
            stop = min(at + ns, end)
            goes_on = flow if phase in ("draft", "verify") and phase != last else ()
            ends = flow if phase == last else ()
            self._events.slice(self._phase(phase), at, stop, phase, begins=goes_on, ends=ends)
            at = stop
