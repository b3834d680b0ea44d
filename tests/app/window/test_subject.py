"""One subject: a run, or a comparison. Every panel about it says which, and what is said of it goes
with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtWidgets import QDockWidget
from pytestqt.qtbot import QtBot

from app.engine_thread.events import State
from app.trace_models.run_notes import run_name
from app.window.dock_area import LAYOUTS
from app.window.menus import TitleNote
from app.window.window import MainWindow
from engine.trace.facts import ForkOrigin, GateFacts
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.fake_session import FakeEngine
from tests.support.lane_traces import CLEAN, LaneBuilder
from tests.support.timed_trace import add_rounds, begin, timed_trace
from tests.support.window_acts import messages, settle, trigger, wait

PANELS = ("rollback", "memory", "inspector", "runs", "speed", "tuning")


@pytest.fixture
def store() -> TraceStore:
    """Run 0, then runs 1 and 2 as the lanes of a comparison."""
    store, _, _ = timed_trace(20)
    LaneBuilder(store).lane("planes", CLEAN)
    return store


def said(dock: QDockWidget) -> str:
    (note,) = dock.findChildren(TitleNote)
    return note.text()


@pytest.mark.shares_window
def test_every_panel_names_what_it_shows(window: MainWindow, store: TraceStore) -> None:
    n_runs = len(store.runs)
    for run_id in (0, n_runs - 1):
        window.feed.show_run(RunRef(store, run_id))
        name = f"run {run_id}" if run_id == 0 else f"run {n_runs - 2}, planes"
        whole = name if run_id == 0 else f"run {n_runs - 2}, 2 lanes"
        assert {said(window.docks[panel]) for panel in PANELS} == {name}
        assert said(window.docks["findings"]) == said(window.docks["divergence"]) == whole
        assert said(window.docks["conversation"]) == f"not of {name}"
    window.feed.clear()
    assert {said(window.docks[panel]) for panel in (*PANELS, "findings")} == {""}


@pytest.mark.shares_window
def test_pages_about_files_do_not_name_a_run(window: MainWindow, store: TraceStore) -> None:
    """What they show does not follow the run on show."""
    run = RunRef(store, 0)
    window.feed.show_run(run)
    for page, dock, text in (
        ("what_if", "tuning", "run 0"),
        ("results", "tuning", ""),
        ("drafter", "tuning", "run 0"),
        ("gate", "lab", "not of run 0"),
        ("conform", "lab", ""),
        ("faults", "lab", ""),
    ):
        window.docks.turn_to([page])
        assert said(window.docks[dock]) == text, page
    window.docks.turn_to(["gate"])
    run.facts.gate = GateFacts("rollback", "planes", 3, "right", "")
    window.feed.show_run(run)
    assert said(window.docks["lab"]) == "run 0"


@pytest.mark.shares_window
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.thinned(4)
def test_the_name_is_in_sight_between_title_and_buttons(
    window: MainWindow, store: TraceStore, qtbot: QtBot, layout: str
) -> None:
    window.resize(1280, 800)
    trigger(window, f"view.layout_{layout}")
    window.feed.show_run(RunRef(store, 0))
    settle(qtbot)
    for panel in (name for name in LAYOUTS[layout].bottom if name in PANELS):
        dock = window.docks[panel]
        (note,) = dock.findChildren(TitleNote)
        assert note.isVisible(), panel
        assert note.x() > note.fontMetrics().horizontalAdvance(dock.windowTitle())
        assert note.geometry().bottom() <= dock.widget().y()


@pytest.mark.shares_window
def test_a_comparison_goes_with_its_lanes(window: MainWindow, store: TraceStore) -> None:
    """With another run on show its figures would be taken for that run's."""
    lane = RunRef(store, len(store.runs) - 1)
    window.feed.show_run(lane)
    assert window.divergence._lanes is not None
    window.feed.show_run(RunRef(store, 0))
    assert window.divergence._lanes is None
    assert not window.divergence.has_divergences
    window.feed.show_run(lane)
    assert window.divergence._lanes is not None


@pytest.mark.shares_window
def test_a_message_about_a_run_goes_with_it(
    window: MainWindow, store: TraceStore, qtbot: QtBot
) -> None:
    runs = [RunRef(store, run_id) for run_id in range(len(store.runs))]
    window.feed.show_run(runs[0])
    of_run = window.panels.run_banners.add(runs[0], "info", "Of one run.")
    of_lane = window.panels.run_banners.add(runs[-1], "info", "Of a lane.")
    of_all = window.banners.add("info", "Of no run.")
    settle(qtbot)
    for shown, seen in ((0, [1, 0, 1]), (-1, [0, 1, 1]), (-2, [0, 1, 1]), (0, [1, 0, 1])):
        window.feed.show_run(runs[shown])
        hidden = [banner.isHidden() for banner in (of_run, of_lane, of_all)]
        assert hidden == [not one for one in seen], shown
    window.feed.show_run(None)
    assert of_run.isHidden() and not of_all.isHidden()


@pytest.mark.shares_window
def test_a_fork_has_its_parent_over_it_and_no_other_run_has(window: MainWindow) -> None:
    store, _, parent = timed_trace(12)
    other = begin(store, ("draft-mtp",))
    add_rounds(store, other, 0, 6)
    fork = RunRef(store, begin(store, ("draft-mtp",)))
    fork.facts.fork = ForkOrigin(parent=parent, round=4)
    add_rounds(store, fork.run_id, 4, 12)
    over = []
    for run_id in (fork.run_id, other, fork.run_id, parent):
        window.feed.show_run(RunRef(store, run_id))
        over.append(None if window.feed.overlay is None else window.feed.overlay.run.run_id)
    assert over == [parent, None, parent, fork.run_id], "parent and fork change places"


def test_a_run_of_another_model_is_named_where_the_model_is(
    loaded: MainWindow, model_file: Path, qtbot: QtBot
) -> None:
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    first = loaded.feed.run
    assert said(loaded.docks["model"]) == ""
    with qtbot.waitSignal(loaded.bridge.loaded):
        loaded.open_model(model_file.with_name("other.gguf"))
    wait(qtbot, loaded, State.READY)
    loaded.runs.run_selected.emit(first)
    assert said(loaded.docks["model"]) == "in use; run 0 is of model"
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    qtbot.waitUntil(lambda: said(loaded.docks["model"]) == "")


def test_titles_follow_the_name_and_number_in_runs(loaded: MainWindow, qtbot: QtBot) -> None:
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    run = loaded.feed.run
    assert run is not None
    assert said(loaded.docks["rollback"]) == run_name(run)
    loaded.runs.rename_asked.emit(run, "mine")
    assert said(loaded.docks["rollback"]) == "mine"


def test_a_run_that_goes_on_is_not_lost_from_sight(
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot
) -> None:
    """With an earlier run of the session on show nothing said so."""
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    first = loaded.feed.run
    engine.rounds = 10**9
    trigger(loaded, "run.step")
    wait(qtbot, loaded, State.PAUSED)
    assert messages(loaded) == []
    loaded.runs.run_selected.emit(first)
    assert loaded.feed.run == first
    assert messages(loaded) == ["info: Run 1 is paused in the background."]
    (banner,) = loaded.banners.banners
    banner.offer_buttons[0].click()
    assert loaded.feed.run == loaded.bridge.live != first
    assert messages(loaded) == []
    trigger(loaded, "run.stop")
    wait(qtbot, loaded, State.READY)


def test_a_run_is_named_by_its_number_from_its_first_moment(
    loaded: MainWindow, qtbot: QtBot
) -> None:
    """The lanes before it have one number, which goes on after them."""
    seen: list[list[str]] = []

    def look(run: RunRef | None) -> None:
        if run is None:
            return
        empty, rollback = loaded.divergence._empty.words[0], said(loaded.docks["rollback"])
        seen.append([loaded.status.texts["model"].partition("shown: ")[2], rollback, empty])

    loaded.feed.run_shown.connect(look)
    loaded.run_panel.prompt.setPlainText("def f")
    for action in ("run.compare", "run.start"):
        trigger(loaded, action)
        wait(qtbot, loaded, State.RUNNING)
        wait(qtbot, loaded, State.READY)
        settle(qtbot)
    newest = loaded.feed.run
    assert newest is not None and newest.run_id > 1
    loaded.runs.run_selected.emit(RunRef(newest.store, 2))
    loaded.runs.run_selected.emit(newest)
    for names in seen:
        assert names[2] == f"No comparison with {names[0]}"
        assert names[0] == names[1]
    whole = [names[0] for names in seen]
    assert whole[-1] == "run 1" and whole[-3] == "run 1" and whole[-2].startswith("run 0, ")
