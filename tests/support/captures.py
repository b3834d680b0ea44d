"""Captures of real llama-servers, and what a run that observed one has in its rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.observe.files.capture import Capture, read_capture, replay
from engine.trace.store import TraceStore

SHARED = Path(__file__).parents[3] / "shared" / "captures"
OURS = Path(__file__).parents[1] / "data" / "captures"


def load(name: str) -> Capture:
    """A capture by its name; skips the test where it is not there."""
    for folder in (SHARED, OURS):
        path = folder / f"{name}.json.gz"
        if path.is_file():
            return read_capture(path.read_bytes(), path.name)
    pytest.skip(f"the capture {name} is not here")


def imported(capture: Capture, *, with_log: bool) -> TraceStore:
    """A trace with the capture as its run."""
    store = TraceStore()
    replay(capture if with_log else replace(capture, log=""), store)
    return store


def rounds_of(store: TraceStore, seq_id: int, *names: str) -> list[tuple[Any, ...]]:
    """Columns of a sequence's rows of rounds, in order."""
    table = store.rounds
    rows = [i for i, seq in enumerate(table.column("seq_id").tolist()) if seq == seq_id]
    columns = {c.name: c.kind for c in table.columns}
    values = [
        table.texts(name)
        if columns[name] == "text"
        else [table.row(i)[name] for i in range(len(table))]
        for name in names
    ]
    return [tuple(column[i] for column in values) for i in rows]


def ids_of(store: TraceStore, seq_id: int, *kinds: str) -> list[int | None]:
    """Ids of a sequence's tokens of these kinds, in the order of their positions."""
    table = store.tokens
    rows = (table.row(i) for i in range(len(table)))
    found = [r for r in rows if r["seq_id"] == seq_id and r["kind"] in kinds]
    return [row["token_id"] for row in sorted(found, key=lambda row: row["pos"])]
