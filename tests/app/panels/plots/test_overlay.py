"""A second run over the one on show, in the real window: what the lines hold, and when they go."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.panels.plots.acceptance_view import WINDOW, AcceptanceView
from app.panels.plots.bar_view import BarView, OverlaidView
from app.window.window import MainWindow
from engine.trace.export import export_csv
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from engine.trace.timings import acceptance
from tests.app.panels.plots.conftest import (
    BARS,
    LONG,
    SHORT,
    UNITS,
    ends,
    height,
    in_front,
    line,
    n_over,
    rows_of,
)
from tests.support.timed_trace import add_rounds, begin

pytestmark = pytest.mark.shares_window


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
        overlaid.appearance.set_theme(name)
        QApplication.processEvents()
        image = view.plot.grab().toImage()
        colour = overlaid.panels.theme.color("plot.overlay").name()
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
