"""Plots of a run, with a second one laid over it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PySide6.QtWidgets import QApplication

from app.panels.plots.acceptance_view import AcceptanceView
from app.panels.plots.bar_view import BarView, OverlaidView
from app.trace_models.run_rows import RunOverlay
from app.window.window import MainWindow
from engine.trace.records import PHASES
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.timed_trace import add_rounds, begin

SHORT, LONG = 30, 50
UNITS = ("round", "token", "time")
BARS = ("rollback", "timing", "verify", "kv")


@pytest.fixture
def store() -> TraceStore:
    """Run 0 of two sequences, plain; run 1 with drafts; run 2, longer, of two sequences."""
    store = TraceStore()
    add_rounds(store, begin(store, ()), 0, SHORT, 2, drafts=False)
    add_rounds(store, begin(store, ("draft-mtp",)), 0, SHORT)
    add_rounds(store, begin(store, ("draft-mtp",)), 0, LONG, 2)
    return store


@pytest.fixture
def overlaid(window: MainWindow, store: TraceStore) -> MainWindow:
    """Run 2 over run 1."""
    window.resize(1280, 800)
    window.feed.show_run(RunRef(store, 1))
    window.feed.set_overlay(RunRef(store, 2))
    return window


def rows_of(store: TraceStore, table: str, run_id: int, round_: int) -> list[dict[str, Any]]:
    found = store.tables[table]
    mine = (found.column("run_id") == run_id) & (found.column("round") == round_)
    return [found.row(row) for row in np.flatnonzero(mine).tolist()]


def height(store: TraceStore, name: str, run_id: int, round_: int) -> float:
    """What the bar of a round comes to, by hand."""
    rows = rows_of(store, "rounds", run_id, round_)
    if name == "rollback":
        return max(max(row["rollback_depth"] or 0, 0) for row in rows)
    if name == "timing":
        return sum(row[f"{phase}_ms"] for row in rows for phase in PHASES)
    if name == "kv":
        return sum(row["kv_cells_used"] for row in rows)
    ubatches = rows_of(store, "ubatches", run_id, round_)
    return sum(row["n_seqs"] * row["n_seq_tokens"] for row in ubatches)


def ends(store: TraceStore, unit: str, run_id: int, n_rounds: int) -> list[float]:
    """The right edge of every round, by hand."""
    if unit == "round":
        return [number + 0.5 for number in range(n_rounds)]
    found, total = [], 0.0
    for number in range(n_rounds):
        rows = rows_of(store, "rounds", run_id, number)
        if unit == "token":
            total += sum(row["num_emitted"] for row in rows)
        else:
            total = max(row["t_ms"] for row in rows) / 1e3
        found.append(total)
    return found


def line(window: MainWindow, name: str) -> tuple[np.ndarray, np.ndarray]:
    view = window.plots[name]
    assert isinstance(view, BarView)
    x, y = view._lines[0].getData()
    return (np.zeros(0), np.zeros(0)) if x is None else (x, y)


def in_front(window: MainWindow, name: str) -> OverlaidView:
    window.docks.reveal(name)
    QApplication.processEvents()
    view = window.plots[name]
    assert isinstance(view, OverlaidView)
    return view


def ids(overlay: RunOverlay | None) -> tuple[int, int]:
    assert overlay is not None
    return overlay.run.run_id, overlay.over.run_id


def n_over(view: OverlaidView) -> int:
    """Points that are drawn of a second run."""
    if isinstance(view, BarView):
        lines = [view._lines[0]]
    else:
        assert isinstance(view, AcceptanceView)
        lines = [*view._lines_over, *view.rates.curves_over.values()]
    drawn = [item.getData()[0] for item in lines]
    return sum(0 if x is None else len(x) for x in drawn)
