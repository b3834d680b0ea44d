"""The Gate view: cells by facts of runs, what a click selects, and how far a bisect is."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app.looks import Theme
from app.panels.lab.gate_view import GateView
from engine.experiments.bisect import progress_file
from engine.trace.facts import GateFacts
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter, this_engine

CHECKS = (
    ("mixed", "planes", 3, "right", ""),
    ("mixed", "checkpoint", 3, "WRONG", "state-wrong: layer 2"),
    ("all rejected", "planes", 1, "known defect", "stale-plane"),
)


@pytest.fixture
def view(qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> GateView:
    monkeypatch.setenv("DRAFTSCOPE_DATA_DIR", str(tmp_path))
    made = GateView(Theme("light"))
    qtbot.addWidget(made)
    made.resize(700, 400)
    made.show()
    qtbot.waitExposed(made)
    return made


def checked() -> TraceStore:
    store = TraceStore()
    TraceWriter.begin(store, this_engine(), {"lane": "reference"})
    for check in CHECKS:
        facts = {"lane": "llama.cpp,x", "compute": "llama.cpp 1.2"}
        run = TraceWriter.begin(store, this_engine(), facts)
        store.runs[run.run_id].gate = GateFacts(*check)
    script = {"scenario": "slots", "policy": "planes", "n_draft": 0, "outcome": "right"}
    store.runs[0].add_to("gate_scripts", script | {"about": ""})
    return store


def test_the_form_is_there_before_any_check(view: GateView) -> None:
    assert not view.has_rounds
    assert view.form.isVisible() and view.empty.isVisible()


def test_cells_are_checks_and_a_click_selects_the_lane(view: GateView, qtbot: QtBot) -> None:
    store = checked()
    view.show_run(RunRef(store, 0))
    qtbot.waitUntil(lambda: view.has_rounds)
    shown = view.grid.shown
    assert shown is not None
    assert shown.y_labels == ("slots", "all rejected, 1", "mixed, 3")
    assert shown.x_labels == ("planes", "checkpoint")
    assert shown.texts == (("right", ""), ("known defect", ""), ("right", "WRONG"))
    assert shown.grounds[2] == ("accepted.tint", "status.error_tint")
    assert view.headline.text() == "llama.cpp 1.2: 2 right, 1 WRONG, 1 known defect"
    assert view.grid.tip(2, 1) == "mixed, 3, checkpoint: WRONG: state-wrong: layer 2"
    assert view.grid.tip(1, 1) == ""
    with qtbot.assertNotEmitted(view.run_selected):  # a script has no lane
        place = view.grid.cell_box(0, 0).center().toPoint()
        qtbot.mouseClick(view.grid, Qt.MouseButton.LeftButton, pos=place)
    with qtbot.waitSignal(view.run_selected) as selected:
        place = view.grid.cell_box(2, 1).center().toPoint()
        qtbot.mouseClick(view.grid, Qt.MouseButton.LeftButton, pos=place)
    assert selected.args == [RunRef(store, 2)]
    assert [row[4] for row in view.table()[1]] == ["right", "WRONG", "known defect", "right"]
    for name in ("light", "dark"):
        view.grid._theme.become(name)
        view.grab()


def test_several_settings_are_columns_and_a_baseline_tells_what_is_new(
    view: GateView, qtbot: QtBot
) -> None:
    store = TraceStore()
    for facts in (
        ("mixed", "planes", 3, "right", "", "-n 9", "right"),
        ("mixed", "checkpoint", 3, "right", "", "-n 9", "right"),
        ("mixed", "planes", 3, "right", "", "-fa on -n 9", "right"),
        ("mixed", "checkpoint", 3, "WRONG", "state-wrong", "-fa on -n 9", "right"),
        ("all rejected", "planes", 3, "WRONG", "", "-fa on -n 9", "known defect"),
        ("all rejected", "checkpoint", 3, "known defect", "", "-n 9", ""),
    ):
        run = TraceWriter.begin(store, this_engine(), {"lane": "llama.cpp,x"})
        store.runs[run.run_id].gate = GateFacts(*facts)
    view.show_run(RunRef(store, 0))
    qtbot.waitUntil(lambda: view.has_rounds)
    shown = view.grid.shown
    assert shown is not None and shown.x_labels == ("defaults", "-fa on")
    assert shown.x_name == "settings, with -n 9"
    assert shown.y_labels == ("all rejected, 3", "mixed, 3")
    assert shown.texts == (("known defect", "WRONG"), ("right", "new: WRONG 1/2"))
    assert shown.grounds[0] == ("status.warning_tint", "status.warning_tint")
    assert shown.grounds[1][1] == "status.error_tint"
    assert view.headline.text().endswith("; 1 new")
    assert view.grid.tip(1, 1).splitlines()[0] == (
        "mixed, 3, checkpoint: WRONG (baseline: right): state-wrong"
    )
    with qtbot.waitSignal(view.run_selected) as selected:  # the worst of its lanes
        view.grid.chosen.emit(1, 1)
    assert selected.args == [RunRef(store, 3)]
    assert view.form.parentWidget() is view.page


def test_a_trace_without_checks_is_empty(view: GateView, qtbot: QtBot) -> None:
    store = TraceStore()
    TraceWriter.begin(store, this_engine(), {})
    view.show_run(RunRef(store, 0))
    qtbot.wait(10)
    assert not view.has_rounds


def test_how_far_a_bisect_is(view: GateView, qtbot: QtBot) -> None:
    path = progress_file()
    path.parent.mkdir(parents=True)
    path.write_text("Bisect a to b: c is built\n1 right\u202e\n" + "x" * 9000)
    view.look()
    assert view.bisect.text().splitlines()[:2] == ["Bisect a to b: c is built", "1 right⟨U+202E⟩"]
    assert len(view.bisect.text()) < 300
    view.show_run(RunRef(checked(), 0))
    qtbot.waitUntil(lambda: view.has_rounds)
    assert view.bisect.isVisibleTo(view)
