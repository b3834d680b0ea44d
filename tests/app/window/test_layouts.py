"""Named layouts: each opens what it is named after, is kept for itself, and can be reset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import QEvent, QObject, QRect, Qt
from PySide6.QtGui import QScreen
from PySide6.QtWidgets import QApplication, QPushButton, QTabBar
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.panels.tokens.end_card import COMPARE, NextStep, RunEnd
from app.widgets.empty_state import EmptyState
from app.window.dock_area import LAYOUTS, TITLES, known_layout
from app.window.window import MainWindow
from engine.trace.export import export_csv
from engine.trace.run_ref import RunRef
from tests.support.fake_session import FakeEngine
from tests.support.sweeps import write_results
from tests.support.timed_trace import timed_trace
from tests.support.window_acts import VIEWS, settle

STEP = NextStep(COMPARE, "See whether rolling back leaves the text as it would be without.")


class EventCounter(QObject):
    """Counts the events of a kind by the names of the objects that get them."""

    def __init__(self, kind: QEvent.Type) -> None:
        super().__init__()
        self._kind, self.names = kind, Counter[str]()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        self.names[watched.objectName()] += event.type() == self._kind
        return False


def shown(window: MainWindow) -> set[str]:
    return {name for name in TITLES if window.docks[name].isVisible()}


def choose(window: MainWindow, name: str) -> None:
    window.actions_by_id[f"view.layout_{name}"].trigger()


def test_an_unknown_layout_is_the_first() -> None:
    assert [known_layout(name) for name in ("rollback", "pile", "")] == [
        "rollback",
        "stream",
        "stream",
    ]


def test_layouts_name_known_docks_once() -> None:
    for layout in LAYOUTS.values():
        placed = [*layout.left, *layout.bottom]
        assert len(placed) == len(set(placed))
        assert {*placed, *layout.shown} <= set(TITLES)


@pytest.mark.shares_window
def test_each_opens_its_docks(window: MainWindow) -> None:
    for name in LAYOUTS:
        choose(window, name)
        assert shown(window) == set(LAYOUTS[name].shown), name
        assert window.actions_by_id[f"view.layout_{name}"].isChecked()
        assert window.tokens.isVisibleTo(window) or window.centralWidget().isVisible(), name


def test_a_layout_without_what_has_the_keys_gives_them_to_the_text(window: MainWindow) -> None:
    store, _, run_id = timed_trace(20)
    window.feed.show_run(RunRef(store, run_id))
    window.docks.enter("runs")
    window.activateWindow()
    choose(window, "plots")
    at = QApplication.focusWidget()
    assert at is not None and window.centralWidget().isAncestorOf(at)
    window.docks.enter("timing")
    at = QApplication.focusWidget()
    choose(window, "plots")
    assert QApplication.focusWidget() is at, "it is there, too"


def test_a_layout_that_was_left_is_placed_once(window: MainWindow, qtbot: QtBot) -> None:
    """Its first places are for a layout that was not left yet: to take both takes twice as long."""
    for name in ("plots", "divergence", "stream"):
        choose(window, name)
        settle(qtbot)
    shows = EventCounter(QEvent.Type.Show)
    for name in TITLES:
        window.docks[name].installEventFilter(shows)
    choose(window, "plots")
    settle(qtbot)
    assert shown(window) == set(LAYOUTS["plots"].shown)
    assert shows.names == Counter(f"dock.{name}" for name in LAYOUTS["plots"].shown)


def test_a_layout_makes_the_plots_in_sight_and_no_others(window: MainWindow, qtbot: QtBot) -> None:
    """Docks come into sight on the way to their places."""
    for name in ("rollback", "divergence", "stream"):
        before = set(window.plots.views)
        choose(window, name)
        settle(qtbot)
        seen = {n for n in VIEWS if window.docks[n].isVisible()}
        seen = {n for n in seen if window.docks[n].geometry().right() >= 0}
        assert set(window.plots.views) - before <= seen, name
        made = {n for n in seen if window.docks.front(n) is None}
        assert not made, f"{name}: not made"


@pytest.mark.usefixtures("each_font")
@pytest.mark.thinned(4)
def test_divergence_gets_the_room(window: MainWindow, qtbot: QtBot) -> None:
    choose(window, "divergence")
    dock = window.docks["divergence"]
    qtbot.waitUntil(lambda: dock.height() > 0.6 * window.height())
    assert dock.width() == window.width()
    choose(window, "rollback")
    qtbot.waitUntil(
        lambda: (
            window.docks["memory"].height() + window.docks["rollback"].height()
            > 0.55 * window.height()
        )
    )


def test_each_is_kept_for_itself(
    make_window: Callable[[Bridge], MainWindow], engine: FakeEngine
) -> None:
    def new() -> MainWindow:
        return make_window(Bridge(engine))

    first = new()
    first.docks["memory"].close()
    choose(first, "rollback")
    first.docks["findings"].show()
    first.docks.reveal("what_if")
    first.docks["tuning"].close()
    choose(first, "stream")
    assert shown(first) == set(LAYOUTS["stream"].shown) - {"memory"}
    choose(first, "rollback")
    first.close()
    second = new()
    assert second.docks.layout_name == "rollback"
    assert shown(second) == {*LAYOUTS["rollback"].shown, "findings"}
    assert second.docks.pages == ["ring", "faults", "acceptance", "what_if"]
    second.actions_by_id["view.reset_layout"].trigger()
    assert shown(second) == set(LAYOUTS["rollback"].shown)
    assert second.docks.pages[3] == "tune"
    choose(second, "stream")
    assert "memory" not in shown(second)


@pytest.mark.usefixtures("each_font")
@pytest.mark.parametrize(("n_lines", "n_columns"), [(38, 2), (64, 1)])
@pytest.mark.thinned(8)
def test_plots_fit_a_low_window_in_two_columns(
    window: MainWindow, qtbot: QtBot, n_lines: int, n_columns: int
) -> None:
    height = n_lines * window.fontMetrics().height()
    window.resize(853, height)
    choose(window, "plots")
    plots = [window.docks[name] for name in LAYOUTS["plots"].bottom]
    qtbot.waitUntil(lambda: len({dock.x() for dock in plots}) == n_columns)
    assert window.height() == height, "no layout makes the window larger than its screen"
    widths = [dock.width() for dock in plots]
    assert max(widths) - min(widths) <= 8


@pytest.mark.usefixtures("each_font")
@pytest.mark.thinned(4)
def test_panels_at_the_right_leave_room_for_the_text(window: MainWindow, qtbot: QtBot) -> None:
    window.resize(1024, 720)
    window.docks.reveal("findings")
    dock, text = window.docks["findings"], window.centralWidget()
    qtbot.waitUntil(lambda: dock.width() > 200)
    assert text.width() >= window.docks.characters(36)


@pytest.mark.shares_window
def test_no_bars_of_earlier_tabs_stay_in_sight(window: MainWindow, qtbot: QtBot) -> None:
    for name in ("divergence", "rollback", "stream", "divergence", "stream"):
        choose(window, name)
        window.docks["findings"].setFloating(True)
        window.docks["findings"].setFloating(False)
    window.docks.reveal("divergence", "findings")
    settle(qtbot)
    bars = [
        bar
        for bar in window.findChildren(QTabBar, options=Qt.FindChildOption.FindDirectChildrenOnly)
        if bar.isVisible() and bar.height() > 0
    ]
    texts = [[bar.tabText(i) for i in range(bar.count())] for bar in bars]
    assert sorted(texts) == [["Divergence", "Findings"], ["Memory", "Acceptance and time"]]


@pytest.mark.shares_window
def test_a_floating_dock_comes_back(window: MainWindow) -> None:
    window.docks["memory"].setFloating(True)
    window.actions_by_id["view.reset_layout"].trigger()
    assert not window.docks["memory"].isFloating()
    assert shown(window) == set(LAYOUTS["stream"].shown)


def test_every_empty_dock_offers_what_fills_it(window: MainWindow) -> None:
    for name in VIEWS:
        window.docks.reveal(name)
        view = window.docks.view(name)
        empty = [e for e in view.findChildren(EmptyState) if e.isVisibleTo(view)]
        if name in ("run", "faults", "breaks", "conform"):
            assert not empty, "a form is never empty"
            continue
        assert len(empty) == 1, name
        if name != "conversation":  # the field below fills it
            assert empty[0].findChildren(QPushButton), name
    start = window.plots.rollback.findChildren(EmptyState)[0].findChildren(QPushButton)
    assert [(b.text(), b.isEnabled()) for b in start] == [("Run", False), ("Open Demo", True)]
    window.actions_by_id["run.start"].setEnabled(True)
    assert start[0].isEnabled()


@pytest.mark.shares_window
def test_a_window_beyond_the_screen_comes_back_onto_it(window: MainWindow) -> None:
    room = window.screen().availableGeometry()
    window.setGeometry(room.adjusted(-50, -50, 200, 200))
    window.docks.fit_screen()
    assert room.contains(window.frameGeometry())
    assert window.frameGeometry().size() == room.size()
    window.setGeometry(room.adjusted(2, 2, -10, -40))
    before = window.geometry()
    window.docks.fit_screen()
    assert window.geometry() == before, "what fits stays where it is"


@pytest.mark.usefixtures("each_font")
@pytest.mark.parametrize("name", [min(LAYOUTS), max(LAYOUTS)])
@pytest.mark.thinned(8)  # of the layouts it is left in: all are chosen afterwards
def test_a_layout_left_on_a_large_screen_fits_a_small_one(
    make_window: Callable[[Bridge], MainWindow],
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    qtbot: QtBot,
    name: str,
) -> None:
    screen = QRect(0, 0, 2560, 1440)
    monkeypatch.setattr(QScreen, "availableGeometry", lambda _: screen)
    large = make_window(Bridge(engine))
    large.setGeometry(screen)
    for each in LAYOUTS:
        choose(large, each)
        for dock in ("model", "run", "what_if", "inspector"):
            large.docks.reveal(dock)
        QApplication.processEvents()
    choose(large, name)
    large.close()
    screen = QRect(0, 0, 1280, 720)
    small = make_window(Bridge(engine))
    small.docks.fit_screen()
    for each in (name, *LAYOUTS):
        choose(small, each)
        settle(qtbot)
        assert screen.contains(small.frameGeometry()), each
        docks = [small.docks[dock] for dock in shown(small)]
        in_front = [dock.geometry() for dock in docks if dock.geometry().right() >= 0]
        assert in_front and all(small.rect().contains(box) for box in in_front), each


@pytest.mark.usefixtures("each_font")
@pytest.mark.thinned(4)  # of two fonts, the one that needs more room
def test_no_panel_makes_a_window_of_1280_by_800_at_one_and_a_half_too_large(
    window: MainWindow, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With something in every panel, and with a title bar."""
    width, height = 853, 503
    monkeypatch.setattr(QScreen, "availableGeometry", lambda _: QRect(0, 0, width, 533))
    store, _, _ = timed_trace(60)
    window.opened_results.open(write_results(tmp_path, 3, 8))
    qtbot.waitUntil(lambda: window.panels.results.results is not None)
    export_csv(store, tmp_path / "trace")
    window.sessions.open(tmp_path / "trace")
    qtbot.waitUntil(lambda: window.feed.run is not None)
    tune = window.plots["tune"]
    window.docks.reveal("tune")
    qtbot.waitUntil(lambda: tune.has_rounds)
    end = RunEnd("It came to its limit of 128 tokens.", ("128 tokens",), None, False, STEP)
    for layout in LAYOUTS:
        window.tokens.end_card.show_end(end, can_measure=True, can_compare=True)
        window.resize(width, height)
        choose(window, layout)
        window.docks.reset()
        for name in VIEWS:
            opens = window.docks[name].isHidden()
            window.docks.reveal(name)
            settle(qtbot)
            least = window.minimumSizeHint()
            assert least.width() <= width and least.height() <= height, (layout, name, least)
            assert (window.width(), window.height()) == (width, height), (layout, name)
            if opens:
                window.docks[name].close()


@pytest.mark.shares_window
def test_a_panel_opened_as_another_closes_has_its_room(window: MainWindow, qtbot: QtBot) -> None:
    window.docks.reveal("findings")
    settle(qtbot)
    wide = window.docks["findings"].width()
    window.docks["findings"].close()
    window.docks.reveal("runs")
    settle(qtbot)
    assert window.docks["runs"].width() >= wide - 8
