"""The Tune view: asks for estimates in sight alone, marks the best and the run's own setting, and
puts what is chosen into the Run panel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.looks import Theme
from app.panels.tune.tune_view import TuneView
from app.trace_models.shown_text import significant
from app.trace_models.tune_surface import (
    BEST,
    CURRENT,
    SurfaceRequest,
    cell_colours,
    contrast,
    estimate,
    headline,
    heat_map,
    note,
    recorded_setting,
)
from app.window.window import MainWindow
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.confident_trace import confident_trace
from tests.support.window_acts import settle


@pytest.fixture(scope="module")
def run() -> RunRef:
    return confident_trace(150)


@pytest.fixture
def view(qtbot: QtBot) -> TuneView:
    view = TuneView(Theme("dark"))
    qtbot.addWidget(view)
    view.resize(1200, 500)
    view.show()
    qtbot.waitExposed(view)
    return view


def shown(window: MainWindow, qtbot: QtBot, run: RunRef) -> TuneView:
    view = window.plots["tune"]
    window.docks.reveal("tune")
    window.feed.show_run(run)
    qtbot.waitUntil(lambda: view.shown is not None)
    return view


def test_the_map_is_that_of_the_surface(run: RunRef) -> None:
    found = estimate((run, "fixed"))
    assert found is not None
    one, drawn = found.surface, heat_map(found)
    assert drawn.values.shape == (10, 4)
    assert np.array_equal(drawn.values, one.tokens_per_second.T)
    assert BEST not in drawn.marks, "its passes were timed too seldom for a verdict"
    row, column = heat_map(replace(found, gain=(1.2, 1.4))).marks[BEST]
    assert drawn.values[row, column] == np.nanmax(drawn.values)
    assert (drawn.marks[CURRENT], drawn.x_labels[3], drawn.y_labels[0]) == ((0, 3), "4", "0")
    assert found.setting(3, 0) == recorded_setting(run) == (4, 0.0)
    # what was recorded is what the run did
    t_ms = run.store.rounds.column("t_ms")
    emitted = int(run.store.rounds.column("num_emitted")[1:].sum())
    speed = 1e3 * emitted / (t_ms[-1] - 20)
    assert one.tokens_per_second[3, 0] == pytest.approx(speed, rel=0.05)


def test_a_run_far_from_its_estimate_is_told() -> None:
    run = confident_trace(60)
    found = estimate((run, "fixed"))
    assert found is not None and "The run itself" not in note(found)
    slow = note(replace(found, measured=found.measured / 3))
    assert f"The run itself had {significant(found.measured / 3)} tok/s" in slow
    run.facts["lane"] = "planes"
    assert "Lanes share their drafts" in note(found)


def test_no_setting_is_best_that_is_no_faster_than_the_one_in_effect() -> None:
    found = estimate((confident_trace(60), "fixed"))
    assert found is not None and found.current is not None
    speeds = found.surface.tokens_per_second
    speeds[...] = np.minimum(speeds, speeds[found.current])
    said = headline(found)
    assert (
        said.startswith("No setting is estimated to be faster than the current one: n_max ")
        and said.count("→") == 1
    ), said
    speeds[...] = np.where(speeds == speeds[found.current], speeds / 2, speeds)
    assert headline(replace(found, gain=(1.2, 1.4))).startswith("Best estimate: ")
    assert ", 1.20 to 1.40 times now. Now: n_max 4" in headline(replace(found, gain=(1.2, 1.4)))
    unsure = headline(replace(found, gain=(0.98, 1.4)))
    assert unsure.startswith("No significant difference: n_max ") and "0.98 to 1.40 times" in unsure
    same = headline(replace(found, gain=(1.004, 1.4)))
    assert same.startswith("No significant difference: n_max "), "that is written as 1.00"
    assert headline(replace(found, gain=None)).startswith("No verdict: ")


def test_below_the_floor_of_the_run_nothing_was_recorded() -> None:
    found = estimate((confident_trace(60, p_min=0.45), "fixed"))
    assert found is not None
    assert heat_map(found).y_labels == ("0.45", "0.5", "0.6", "0.7", "0.8", "0.9")
    assert found.current == (3, 0)


def test_what_is_pointed_at_and_chosen(window: MainWindow, qtbot: QtBot, run: RunRef) -> None:
    view = shown(window, qtbot, run)
    assert view.headline.text().startswith("No verdict: too few ")
    assert "Now: n_max 4, p_min 0 →" in view.headline.text()
    assert view.note.text().startswith(
        "Estimated from 150 rounds, the range from the costs of each quarter. "
        "Passes of 1, 2, 3, 4 tokens were not timed"
    )
    view.grid.setFocus()
    qtbot.keyClick(view.grid, Qt.Key.Key_Left)
    qtbot.keyClick(view.grid, Qt.Key.Key_Down)
    assert "tokens/round" in view.readout.text() and "draft " in view.readout.text()
    QApplication.processEvents()  # the docks have their sizes
    cell = view.grid.cell_box(3, 1).center().toPoint()
    qtbot.mouseClick(view.grid, Qt.MouseButton.LeftButton, pos=cell)
    panel = window.run_panel
    assert (panel.n_max.value(), panel.draft["p_min"].value()) == (2, 0.3)
    assert "n_max 2 and p_min 0.3 are set" in window.status.currentMessage()
    names, rows = view.table()
    assert (names[:2], len(rows), rows[13][:2]) == (["n_max", "p_min"], 40, [2, 0.3])
    qtbot.waitUntil(lambda: not view._waits)


def test_another_rule_is_shown_but_not_set(window: MainWindow, qtbot: QtBot, run: RunRef) -> None:
    view = shown(window, qtbot, run)
    window.run_panel.n_max.setValue(7)
    at = view.rule.findText("survival")
    view.rule.setCurrentIndex(at)
    view.rule.activated.emit(at)
    qtbot.waitUntil(lambda: view.shown is not None and view.shown.request[1] == "survival")
    assert view.grid.shown is not None
    assert view.grid.shown.values.shape == (1, 4)
    assert CURRENT not in view.grid.shown.marks
    assert "not a rule of this engine" in view.readout.text()
    view.grid.chosen.emit(0, 1)
    assert window.run_panel.n_max.value() == 7


def test_what_a_small_map_leaves_is_the_drafters(view: TuneView, run: RunRef) -> None:
    asked: list[SurfaceRequest] = []
    view.asked.connect(asked.append)
    view.resize(2400, 900)
    view.show_run(run)
    view.show_surface(asked[0], estimate(asked[0]))
    QApplication.processEvents()
    last = view.grid.cell_box(0, 3).right()
    assert view.grid.most_wide - 2 == pytest.approx(last, abs=1)  # cells as large as may be
    assert view.grid.width() < 0.4 * view.width() < view.quality.width()
    assert view.note.height() > 2 * view.note.fontMetrics().height()  # all of it can be read
    view.resize(1270, 28 * view.fontMetrics().height())  # in the layout Tune of a small screen
    QApplication.processEvents()
    assert view.note.height() >= view.note.heightForWidth(view.note.width())
    view.resize(700, 300)
    QApplication.processEvents()
    assert view.grid.width() > 0.9 * view.width()
    assert not view.note.wordWrap()


def test_out_of_sight_nothing_is_asked(
    window: MainWindow, qtbot: QtBot, run: RunRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SurfaceRequest] = []
    window.plots["tune"].asked.connect(asked.append)
    window.feed.show_run(run)
    window.feed.refresh()
    settle(qtbot)
    assert not asked
    window.docks.reveal("tune")
    qtbot.waitUntil(lambda: window.plots["tune"].shown is not None)
    assert [one for one, _ in asked] == [run]


def test_one_request_at_a_time(view: TuneView, run: RunRef) -> None:
    asked: list[SurfaceRequest] = []
    view.asked.connect(asked.append)
    view.show_run(run)
    for index in (1, 0):
        view.rule.activated.emit(index)
    assert len(asked) == 1
    view.show_surface((run, "fixed"), None)  # of an earlier run: not waited for
    assert len(asked) == 1
    view.show_surface(asked[0], estimate(asked[0]))
    assert view.shown is not None and len(asked) == 2
    view.show_surface(asked[1], None)
    assert len(asked) == 2 and view.shown is not None
    view.show_run(None)
    assert view.shown is None and view.grid.shown is None


def test_without_a_draft_it_says_how_to_record_one(view: TuneView) -> None:
    store = TraceStore()
    run = RunRef(store, store.begin_run({"options": {"spec": {"types": []}}}))
    store.rounds.append(run_id=0, round=0, seq_id=0, num_emitted=1, verify_width=3)
    view.show_run(run)
    assert not view.has_rounds
    assert view.empty.words[0] == "No draft yet"
    assert "n_max 16 and p_min 0" in view.empty.words[1]


def test_a_drafter_is_its_newest_run(view: TuneView, run: RunRef) -> None:
    store = TraceStore()
    confident_trace(3, store=store)
    simple = confident_trace(4, drafter="draft-simple", store=store)
    newest = confident_trace(5, store=store)
    selected: list[RunRef] = []
    view.run_selected.connect(selected.append)
    view.show_run(simple)
    assert [view.drafter.itemText(i) for i in range(2)] == ["draft-mtp", "draft-simple"]
    assert view.drafter.currentText() == "draft-simple"
    view.drafter.activated.emit(0)
    assert selected == [newest]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_figure_in_a_cell_can_be_read(theme: str) -> None:
    colours = Theme(theme)
    for share in np.linspace(0, 1, 41).tolist():
        ground, ink = cell_colours(colours, share)
        assert contrast(ground, ink) >= 4.5
