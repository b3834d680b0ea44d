"""Pages of a panel: one at a time under tabs, or all below each other under their titles."""

from __future__ import annotations

from PySide6.QtWidgets import QLabel
from pytestqt.qtbot import QtBot

from app.window.dock_area import Pages


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
