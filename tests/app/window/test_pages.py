"""Pages of a panel: one at a time under tabs, or all below each other under their titles."""

from __future__ import annotations

from PySide6.QtWidgets import QApplication, QLabel, QStackedWidget, QWidget
from pytestqt.qtbot import QtBot

from app.looks import Theme
from app.widgets.build import vbox
from app.widgets.fitted_labels import LowPanel
from app.widgets.plot_surface import PlotSurface
from app.window.dock_area import Pages
from app.window.window import MainWindow
from tests.support.trace_builder import sample_trace
from tests.support.window_acts import settle


def test_a_tab_for_each_or_all_below_each_other(qtbot: QtBot) -> None:
    pages = Pages({"a": "First", "b": "Second"})
    qtbot.addWidget(pages)
    views = {name: QLabel(name) for name in "ab"}
    for name, view in views.items():
        assert pages.view(name) is None
        pages.fill(name, view)
        assert pages.view(name) is view
    pages.resize(400, 300)
    pages.show()
    qtbot.waitExposed(pages)
    assert pages.current == "a" and pages.shows("a") and not pages.shows("b")
    assert [view.isVisible() for view in views.values()] == [True, False]
    with qtbot.waitSignal(pages.turned):
        pages.turn_to("b")
    assert [view.isVisible() for view in views.values()] == [False, True]
    pages.set_stack(True)
    assert all(view.isVisible() for view in views.values()) and pages.shows("a")
    assert not pages.bar.isVisible()
    titles = [label.text() for label in pages.findChildren(QLabel) if label.isVisible()]
    assert titles.count("First") == titles.count("Second") == 1
    qtbot.waitUntil(lambda: views["a"].mapTo(pages, views["a"].pos()).y() > 0)
    assert views["a"].height() == views["b"].height() > 100
    pages.set_stack(False)
    assert pages.current == "b" and not views["a"].isVisible() and pages.bar.isVisible()


def test_a_page_that_is_seen_for_the_first_time_takes_the_keys(
    window: MainWindow, qtbot: QtBot
) -> None:
    window.docks.enter("tune")
    window.activateWindow()
    settle(qtbot)
    window.docks.enter("results")
    view, at = window.docks.view("results"), QApplication.focusWidget()
    assert view is not None and at is not None and view.isAncestorOf(at)
    window.feed.show_run(sample_trace(rounds=8).run)
    settle(qtbot)
    window.docks.enter("drafter")
    view, at = window.docks.view("drafter"), QApplication.focusWidget()
    assert view is not None and at is not None and view.isAncestorOf(at)


def test_a_plot_on_a_page_that_scrolls_becomes_lower_with_it(qtbot: QtBot) -> None:
    words = QLabel("word " * 20, wordWrap=True)  # a stack of pages then asks for the best height
    vbox(words, plot := PlotSurface(Theme("light"), "0.00"), of=(page := QWidget()))
    stack = QStackedWidget()
    stack.addWidget(page)
    panel = LowPanel(stack)
    qtbot.addWidget(panel)
    panel.resize(400, 600)
    panel.show()
    qtbot.waitExposed(panel)
    qtbot.waitUntil(lambda: plot.height() > 400)
    panel.resize(400, 240)
    qtbot.waitUntil(lambda: plot.height() < 240)
    assert not panel.verticalScrollBar().isVisible()
