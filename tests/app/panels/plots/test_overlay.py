"""A second run over the one on show, in the real window: what the lines hold, and when they go."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QMenu
from pytestqt.qtbot import QtBot

import app.panels.runs.runs_view
from app.panels.plots.acceptance_view import WINDOW, AcceptanceView
from app.panels.plots.bar_view import BarView, OverlaidView
from app.trace_models.run_rows import RunOverlay
from app.window.plot_group import OVER_ROUNDS
from app.window.window import MainWindow
from engine.trace.export import export_csv
from engine.trace.records import PHASES
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from engine.trace.timings import acceptance
from tests.support.timed_trace import add_rounds, begin

pytestmark = pytest.mark.shares_window

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


def test_steps_are_what_the_trace_says(overlaid: MainWindow, store: TraceStore) -> None:
    for name, unit in product(BARS, UNITS):
        in_front(overlaid, name)
        overlaid.actions_by_id[f"plot.x_{unit}"].trigger()
        overlaid.actions_by_id["plot.show_all"].trigger()
        x, y = line(overlaid, name)
        edges = ends(store, unit, 2, LONG)
        assert x[1::2] == pytest.approx(edges), (name, unit)
        assert x[0] == (-0.5 if unit == "round" else 0.0), "it begins where the other run does"
        assert x[2::2] == pytest.approx(edges[:-1]), (name, unit)
        expected = [height(store, name, 2, number) for number in range(LONG)]
        assert y[::2] == pytest.approx(expected), (name, unit)
        assert y[1::2] == pytest.approx(expected), (name, unit)


def test_rates_are_what_the_engine_says(overlaid: MainWindow, store: TraceStore) -> None:
    view = in_front(overlaid, "acceptance")
    assert isinstance(view, AcceptanceView)
    overlaid.actions_by_id["plot.show_all"].trigger()
    figures = acceptance(store, 2)
    drafted, accepted = (
        np.array(figures[f"per_step_{word}"]).cumsum() for word in ("drafted", "accepted")
    )
    windowed, lifetime = (item.getData()[1] for item in view._lines_over)
    assert lifetime == pytest.approx(accepted / drafted)
    since = np.maximum(np.arange(len(drafted)) - WINDOW, -1)
    before = [np.where(since >= 0, sums[since], 0) for sums in (accepted, drafted)]
    assert windowed == pytest.approx((accepted - before[0]) / (drafted - before[1]))
    for name, rates in figures["acceptance_per_position"].items():
        assert view.rates.curves_over[name].getData()[1].tolist() == pytest.approx(rates)
    own = acceptance(store, 1)
    assert view._lifetime.getData()[1][-1] == pytest.approx(own["draft_acceptance_rate"])


def test_off_again_nothing_is_left(overlaid: MainWindow, store: TraceStore) -> None:
    for name in (*BARS, "acceptance"):
        overlaid.feed.set_overlay(RunRef(store, 2))
        view = in_front(overlaid, name)
        assert n_over(view) > 0, name
        assert any("run 2" in label for label in view.legend.leading_labels), name
        assert "overlaid: run 2" in view.plot.accessibleDescription(), name
        overlaid.actions_by_id["plot.no_overlay"].trigger()
        assert n_over(view) == 0, name
        assert view.legend.leading_labels == [], name
        assert "run 2" not in view.plot.accessibleDescription(), name
        assert overlaid.status.overlay.isHidden()
        assert overlaid.runs.model.overlaid is None
        assert not overlaid.actions_by_id["plot.no_overlay"].isEnabled()


def test_the_axis_makes_room(window: MainWindow) -> None:
    store = TraceStore()
    add_rounds(store, begin(store, ()), 0, SHORT, drafts=False)
    add_rounds(store, begin(store, ("draft-mtp",)), 0, SHORT, 2)
    window.feed.show_run(RunRef(store, 0))
    for name in BARS:
        view = in_front(window, name)
        window.feed.set_overlay(None)
        before = view.plot.box.viewRange()[1][1]
        window.feed.set_overlay(RunRef(store, 1))
        top = view.plot.box.viewRange()[1][1]
        rounds = range(1, SHORT)  # the prompt is taller than any plot
        assert top > max(height(store, name, 1, number) for number in rounds)
        assert top > before or name == "rollback", "where n_rs_seq had taken the room"


def test_the_readout_has_both_values(overlaid: MainWindow, store: TraceStore) -> None:
    for name in BARS:
        overlaid.feed.set_overlay(RunRef(store, 2))
        view = in_front(overlaid, name)
        words = view.readout(7.0, 0.5)
        assert words.startswith("run 1, round 7"), name
        assert "run 2, round 7" in words, name
        assert f"{height(store, name, 2, 7):.3g}" in words.splitlines()[-1], name
        assert view.readout(40.0, 0.5).startswith("run 2, round 40"), name
        assert view.readout(70.0, 0.5) == "", name
        overlaid.feed.set_overlay(None)
        assert view.readout(7.0, 0.5).startswith("round 7"), name


def test_the_readout_of_rates(overlaid: MainWindow, store: TraceStore) -> None:
    view = in_front(overlaid, "acceptance")
    lines = view.readout(23.0, 0.5).splitlines()
    for run_id in (1, 2):
        steps = [
            row
            for number in range(1, 24)
            for row in rows_of(store, "rounds", run_id, number)
            if row["num_draft_tokens"]
        ]
        accepted, drafted = (
            sum(row[f"num_{word}tokens"] for row in steps) for word in ("accepted_draft_", "draft_")
        )
        (rate,) = [line for line in lines if line.endswith(f"lifetime {accepted / drafted:#.3g}")]
        assert lines.index(rate) > lines.index(f"run {run_id}, round 23")


def test_whole_run_brings_the_longer_one_into_sight(
    overlaid: MainWindow, store: TraceStore
) -> None:
    overlaid.actions_by_id["plot.show_all"].trigger()
    assert overlaid.plots.rollback.plot.x_range[1] >= LONG - 0.5
    overlaid.feed.set_overlay(RunRef(store, 0))
    overlaid.actions_by_id["plot.show_all"].trigger()
    assert overlaid.plots.rollback.plot.x_range[1] == SHORT - 0.5


def test_slots_stay_those_of_the_run_on_show(overlaid: MainWindow) -> None:
    assert not isinstance(overlaid.plots["ring"], OverlaidView)
    assert overlaid.plots["ring"].run is not None and overlaid.plots["ring"].run.run_id == 1


def test_the_run_is_named(overlaid: MainWindow) -> None:
    assert overlaid.status.overlay.isVisible()
    assert overlaid.status.overlay.text == "run 2"
    assert "run 2 is drawn dashed over run 1" in overlaid.status.overlay.toolTip()
    for name in BARS:
        assert overlaid.plots[name].legend.leading_labels == ["run 2"]


# -- which run ------------------------------------------------------------------------------


def test_a_key_lays_the_newest_other_or_the_chosen_run_over(
    window: MainWindow, store: TraceStore, qtbot: QtBot
) -> None:
    assert not window.actions_by_id["plot.overlay"].isEnabled()
    window.feed.show_run(RunRef(store, 2))
    qtbot.keyClick(window, Qt.Key.Key_O)
    assert window.feed.overlay is not None and window.feed.overlay.run.run_id == 1
    window.runs.table.setCurrentIndex(window.runs.model.index(0, 0))
    qtbot.keyClick(window, Qt.Key.Key_O)
    assert window.feed.overlay.run.run_id == 0
    qtbot.keyClick(window, Qt.Key.Key_O, Qt.KeyboardModifier.ShiftModifier)
    assert window.feed.overlay is None


def test_one_run_has_none_to_lay_over(window: MainWindow) -> None:
    store = TraceStore()
    add_rounds(store, begin(store, ()), 0, 3, drafts=False)
    window.feed.show_run(RunRef(store, 0))
    assert not window.actions_by_id["plot.overlay"].isEnabled()
    window.feed.set_overlay(RunRef(store, 0))
    assert window.feed.overlay is None, "no run lies over itself"
    window.feed.set_overlay(RunRef(store, 7))
    assert window.feed.overlay is None


def test_by_ctrl_and_a_click(window: MainWindow, store: TraceStore, qtbot: QtBot) -> None:
    window.resize(1280, 800)
    window.feed.show_run(RunRef(store, 0))
    window.docks.reveal("runs")
    window.runs.refresh_numbers()
    QApplication.processEvents()
    assert window.runs.hint.isVisible()
    table = window.runs.table
    qtbot.mouseClick(
        table.viewport(),
        Qt.MouseButton.LeftButton,
        Qt.KeyboardModifier.ControlModifier,
        table.visualRect(window.runs.model.index(2, 2)).center(),
    )
    assert window.feed.run == RunRef(store, 0) and window.feed.overlay is not None
    assert window.feed.overlay.run == RunRef(store, 2)
    assert window.runs.pair.isVisible() and not window.runs.hint.isVisible()


def test_by_the_menu_of_the_list(window: MainWindow, store: TraceStore) -> None:
    window.feed.show_run(RunRef(store, 1))
    window.docks.reveal("runs")
    QApplication.processEvents()
    table = window.runs.table

    def entries(row: int) -> dict[str, Any]:
        place = table.visualRect(window.runs.model.index(row, 0)).center()
        table.customContextMenuRequested.emit(place)
        menu = QApplication.activePopupWidget()
        assert isinstance(menu, QMenu)
        found = {action.text().replace("&", ""): action for action in menu.actions()}
        menu.close()
        return found

    assert not entries(1)["Overlay with This Run"].isEnabled(), "the run on show"
    over = entries(2)["Overlay with This Run"]
    assert not entries(2)["No Overlay"].isEnabled()
    over.trigger()
    assert window.feed.overlay is not None and window.feed.overlay.run.run_id == 2
    assert not window.runs.model.index(2, 0).data(Qt.ItemDataRole.DecorationRole).isNull()
    assert window.runs.model.index(0, 0).data(Qt.ItemDataRole.DecorationRole) is None
    off = entries(2)["No Overlay"]
    off.trigger()
    assert window.feed.overlay is None


def test_taken_off_the_list_it_is_taken_off_the_plots(
    overlaid: MainWindow, store: TraceStore, qtbot: QtBot
) -> None:
    overlaid.docks.reveal("runs")
    table = overlaid.runs.table
    table.setFocus()
    for run_id in (0, 2):
        assert overlaid.feed.overlay is not None
        row = overlaid.runs.model.line_of(RunRef(store, run_id))
        assert row is not None
        table.setCurrentIndex(overlaid.runs.model.index(row, 0))
        qtbot.keyClick(table, Qt.Key.Key_Delete)
    assert overlaid.feed.overlay is None
    assert [row.run.run_id for row in overlaid.runs.model.rows] == [1]
    assert len(line(overlaid, "rollback")[0]) == 0


def test_a_new_run_keeps_it_and_places_change(overlaid: MainWindow, store: TraceStore) -> None:
    view = in_front(overlaid, "kv")
    new = begin(store, ("draft-mtp",))
    overlaid.feed.show_run(RunRef(store, new))
    assert view.overlay is not None and (view.overlay.run.run_id, view.overlay.over.run_id) == (
        2,
        new,
    )
    add_rounds(store, new, 0, 4)
    overlaid.feed.refresh()
    x, _ = line(overlaid, "kv")
    assert x[-1] == LONG - 0.5
    overlaid.feed.show_run(RunRef(store, 2))
    assert view.overlay is not None and (view.overlay.run.run_id, view.overlay.over.run_id) == (
        new,
        2,
    )
    assert view.legend.leading_labels == [f"run {new}"]
    x, _ = line(overlaid, "kv")
    assert x[-1] == 3.5


def test_another_trace_or_none_takes_it_off(overlaid: MainWindow) -> None:
    other = TraceStore()
    for _ in range(3):
        add_rounds(other, begin(other, ()), 0, 3, drafts=False)
    overlaid.feed.show_run(RunRef(other, 1))
    assert overlaid.feed.overlay is None
    assert len(line(overlaid, "rollback")[0]) == 0
    overlaid.feed.set_overlay(RunRef(other, 0))
    assert len(line(overlaid, "rollback")[0]) == 6
    overlaid.feed.clear()
    assert overlaid.feed.overlay is None
    assert overlaid.status.overlay.isHidden()


def test_a_run_that_goes_on_grows(overlaid: MainWindow, store: TraceStore) -> None:
    for name in (*BARS, "acceptance"):
        view = in_front(overlaid, name)
        overlaid.actions_by_id["plot.show_all"].trigger()
        before = n_over(view)
        n_rounds = int(store.rounds.column("round")[-1]) + 1
        add_rounds(store, 2, n_rounds, n_rounds + 2, 2)
        overlaid.feed.refresh()
        overlaid.actions_by_id["plot.show_all"].trigger()
        assert n_over(view) > before, name
    view = in_front(overlaid, "kv")
    before = n_over(view)
    n_rounds = int(store.rounds.column("round")[-1]) + 1
    add_rounds(store, 2, n_rounds, n_rounds + 2, 2)
    overlaid.actions_by_id["plot.pin"].setChecked(True)
    overlaid.plots.rollback.plot.box.setXRange(-0.5, n_rounds + 5, padding=0)
    overlaid.feed.refresh()
    assert n_over(view) == before + 4, "without anything else that draws the plot"


# -- what it costs --------------------------------------------------------------------------


def test_out_of_sight_nothing_is_read(
    window: MainWindow, store: TraceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    compare = app.panels.runs.runs_view.compare_runs
    monkeypatch.setattr(
        app.panels.runs.runs_view, "compare_runs", lambda *a: asked.append(a) or compare(*a)
    )
    for name in (*OVER_ROUNDS, "runs"):
        window.docks[name].hide()
    QApplication.processEvents()
    window.feed.show_run(RunRef(store, 1))
    window.feed.set_overlay(RunRef(store, 2))
    window.feed.refresh()
    overlay = window.feed.overlay
    assert overlay is not None
    assert overlay._axis.rows is None
    assert asked == []
    views = [window.plots[name] for name in OVER_ROUNDS]
    assert all(n_over(view) == 0 for view in views if isinstance(view, OverlaidView))
    view = in_front(window, "timing")
    assert n_over(view) > 0
    window.docks.reveal("runs")
    QApplication.processEvents()
    assert len(asked) == 1
    window.runs.refresh_numbers()
    assert len(asked) == 1, "nothing is new"
    add_rounds(store, 2, LONG, LONG + 1, 2)
    window.runs.refresh_numbers()
    assert len(asked) == 2


def test_a_long_run_is_drawn_with_few_points(window: MainWindow, store: TraceStore) -> None:
    add_rounds(store, 2, LONG, 20_000, 2)
    window.feed.show_run(RunRef(store, 1))
    window.feed.set_overlay(RunRef(store, 2))
    for name in BARS:
        view = in_front(window, name)
        window.actions_by_id["plot.show_all"].trigger()
        assert 100 < n_over(view) <= 2 * view.plot.n_pixels
        deepest = max(height(store, name, 2, number) for number in (0, 7, 12, 19_999))
        if name != "timing":  # whose steps are means there, as the bars are
            assert line(window, name)[1].max() >= deepest


# -- figures side by side -------------------------------------------------------------------


def test_figures_stand_below_the_list(overlaid: MainWindow, store: TraceStore) -> None:
    pair = overlaid.runs.pair
    assert not pair.isVisible()
    overlaid.docks.reveal("runs")
    QApplication.processEvents()
    assert pair.isVisible()
    model = pair.model
    head = [model.headerData(i, Qt.Orientation.Horizontal) for i in range(4)]
    assert head == ["figure", "run 1", "run 2", "1 / 2"]
    lines = {
        model.index(row, 0).data(): [model.index(row, column).data() for column in (1, 2, 3)]
        for row in range(model.rowCount())
    }
    assert lines["rounds"] == [str(SHORT), str(LONG), "0.60×"]
    rates = [acceptance(store, run)["draft_acceptance_rate"] for run in (1, 2)]
    assert [float(text) for text in lines["acceptance"][:2]] == pytest.approx(rates, abs=1e-3)
    overlaid.feed.select_run(RunRef(store, 2))
    assert model.headerData(1, Qt.Orientation.Horizontal) == "run 2"
    overlaid.actions_by_id["plot.no_overlay"].trigger()
    assert not pair.isVisible()


def test_an_opened_trace_has_it_too(
    window: MainWindow, store: TraceStore, tmp_path: Path, qtbot: QtBot
) -> None:
    export_csv(store, tmp_path / "mine")
    with qtbot.waitSignal(window.bridge.trace_shown):
        window.sessions.open(tmp_path / "mine")
    assert window.feed.run.run_id == 2
    window.actions_by_id["plot.overlay"].trigger()
    assert window.feed.overlay is not None and window.feed.overlay.run.run_id == 1
    in_front(window, "timing")
    _, y = line(window, "timing")
    assert y[::2] == pytest.approx([height(store, "timing", 1, n) for n in range(SHORT)])
    window.docks.reveal("runs")
    QApplication.processEvents()
    assert window.runs.pair.model.rowCount() > 8
    window.actions_by_id["file.close_trace"].trigger()
    assert window.feed.overlay is None


def test_lines_can_be_seen_in_both_themes(overlaid: MainWindow) -> None:
    view = in_front(overlaid, "kv")
    for name in ("light", "dark"):
        overlaid.set_theme(name)
        QApplication.processEvents()
        image = view.plot.grab().toImage()
        colour = overlaid.theme.color("plot.overlay").name()
        seen = sum(
            image.pixelColor(x, y).name() == colour
            for x in range(image.width())
            for y in range(image.height())
        )
        assert seen > 100, name


# -- more than two ---------------------------------------------------------------------------


def test_up_to_four_runs_are_drawn(window: MainWindow, store: TraceStore, qtbot: QtBot) -> None:
    for _ in range(2):
        add_rounds(store, begin(store, ("draft-mtp",)), 0, SHORT)
    window.resize(1280, 800)
    window.feed.show_run(RunRef(store, 1))
    for run_id in (0, 2, 3, 4):
        window.runs.overlay_asked.emit(RunRef(store, run_id))
    assert [run.run_id for run in window.feed.overlaid] == [4, 3, 2], "the oldest goes"
    for name in BARS:
        view = in_front(window, name)
        window.actions_by_id["plot.show_all"].trigger()
        assert isinstance(view, BarView)
        for curve, run_id in zip(view._lines, (4, 3, 2), strict=True):
            x, y = curve.getData()
            assert y[0] == pytest.approx(height(store, name, run_id, 0)), (name, run_id)
            assert x[-1] >= SHORT - 1
    rates = in_front(window, "acceptance")
    assert isinstance(rates, AcceptanceView)
    assert all(len(line.getData()[0]) for line in rates._lines_further)
    window.feed.show_run(RunRef(store, 3))
    assert [run.run_id for run in window.feed.overlaid] == [4, 1, 2], "two change places"
    qtbot.keyClick(window, Qt.Key.Key_O, Qt.KeyboardModifier.ShiftModifier)
    assert window.feed.overlaid == []
    assert not any(len(line.getData()[0]) for line in rates._lines_further)
