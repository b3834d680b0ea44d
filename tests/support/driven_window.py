"""The program as a user starts it, driven by keys and clicks: python -m tests.support.driven_window
STORY OUT [options of draftscope].

A story is a function below: a generator that yields what is to come true next. OUT becomes a JSON
object of what was seen on the way. Exit status: that of the program, or 3 with what was waited for
when it does not come about.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PySide6.QtCore import QObject, QPoint, QRect, QTimer
from PySide6.QtGui import QImage
from PySide6.QtWidgets import QApplication, QMenuBar, QTabBar, QToolButton, QWidget

from tests.support.x_display import XUser

if TYPE_CHECKING:
    from app.window.window import MainWindow

_POLL_MS = 20
_PATIENCE = 60.0
_STUCK = 3
_GREY, _CURVE = 60, 100
"""Difference of channels up to which a colour is grey; least pixels of a curve."""
Story = Iterator[tuple[str, Callable[[], object]]]


class Driver(QObject):
    """Goes on with a story whenever what it waits for is true, in modal dialogs too."""

    def __init__(self, app: QApplication, story: Callable[[Driver], Story], out: Path) -> None:
        super().__init__(app)
        self._out = out
        self.app, self.user = app, XUser()
        self.seen: dict[str, Any] = {}
        self.clicks = 0
        self._story = story(self)
        self._wanted: tuple[str, Callable[[], object]] = ("the window", lambda: self.windows)
        self._since = time.monotonic()
        self._timer = QTimer(self)
        self._timer.timeout.connect(self._look)
        self._timer.start(_POLL_MS)

    @property
    def windows(self) -> list[MainWindow]:
        """The main window once it is in sight."""
        shown = [w for w in self.app.topLevelWidgets() if w.objectName() == "main"]
        return [w for w in shown if w.isVisible()]  # type: ignore[misc]

    @property
    def window(self) -> MainWindow:
        (window,) = self.windows
        return window

    def click(self, widget: QWidget) -> None:
        """Click into the middle of what is painted of a widget."""
        self.click_at(widget, widget.visibleRegion().boundingRect().center())

    def click_at(self, widget: QWidget, place: QPoint) -> None:
        """Click at a place in a widget."""
        at, ratio = widget.mapToGlobal(place), widget.devicePixelRatioF()
        self.user.click(round(at.x() * ratio), round(at.y() * ratio))
        self.clicks += 1

    def choose(self, action_id: str) -> None:
        """Click on the button of an action in the tool bar."""
        action = self.window.actions_by_id[action_id]
        buttons = self.window.findChildren(QToolButton)
        (button,) = (b for b in buttons if b.defaultAction() is action and b.isVisible())
        self.click(button)

    def tabs(self, text: str) -> list[tuple[QTabBar, int]]:
        """Every tab in sight with this text."""
        bars = [bar for bar in self.window.findChildren(QTabBar) if bar.isVisible()]
        return [(bar, i) for bar in bars for i in range(bar.count()) if bar.tabText(i) == text]

    def choose_tab(self, text: str) -> None:
        """Click on a tab, the only one in sight with this text."""
        ((bar, at),) = self.tabs(text)
        self.click_at(bar, bar.tabRect(at).center())

    def on_screen(self, widget: QWidget | None) -> bool:
        """Whether all of a widget is painted and inside the screen; of a page, None until then."""
        if widget is None:
            return False
        box = QRect(widget.mapToGlobal(QPoint()), widget.size())
        whole = widget.visibleRegion().boundingRect() == widget.rect()
        return whole and self.app.primaryScreen().geometry().contains(box)

    def _look(self) -> None:
        name, comes_true = self._wanted
        if comes_true():
            self._wanted = next(self._story)
            self._since = time.monotonic()
        elif time.monotonic() - self._since > _PATIENCE:
            picture = self._out.with_suffix(".png")
            self.app.primaryScreen().grabWindow(0).save(str(picture))
            sys.stderr.write(f"Waited in vain for {name}. The screen is in {picture}.\n")
            sys.stderr.flush()
            os._exit(_STUCK)


def first_start(driver: Driver) -> Story:
    """Run the demo, look at the plots, quit and keep the run."""
    from app.engine_thread.events import State

    seen, window = driver.seen, driver.window
    yield "the model", lambda: window.bridge.can_start
    yield "the screen", lambda: driver.on_screen(window)
    seen["screen"] = driver.app.primaryScreen().geometry().getRect()
    seen["window"] = window.frameGeometry().getRect()
    seen["status"] = driver.on_screen(window.statusBar()) and window.status.texts["model"]
    seen["plot_buttons"] = _plot_buttons(driver)
    driver.choose("run.start")
    yield "a run", lambda: window.bridge.live is not None
    yield "its end", lambda: window.bridge.state is State.READY
    card = window.tokens.end_card
    yield "the card at its end", lambda: driver.on_screen(card)
    seen["end"], seen["text"] = card.reason.text(), window.tokens.copy_text()
    driver.user.press("Alt_L", "5")
    yield "the layout Plots", lambda: window.docks.layout_name == "plots"
    names = ("rollback", "ring", "acceptance", "timing", "verify", "kv")
    yield "six plots", lambda: all(driver.on_screen(window.docks.view(name)) for name in names)
    yield "curves in them", lambda: all(_coloured(window, name) >= _CURVE for name in names)
    seen["plots_height"] = window.height()
    seen["plots_status"] = driver.on_screen(window.statusBar())
    seen["plots_buttons"] = _plot_buttons(driver)
    driver.user.press("Control_L", "q")
    yield "the end", lambda: False


def second_start(driver: Driver) -> Story:
    """Find the run of the first start, show it, quit."""
    seen, window = driver.seen, driver.window
    yield "the library", lambda: window.bridge.earlier
    seen["layout"] = window.docks.layout_name
    (earlier,) = window.bridge.earlier
    seen["runs"] = len(earlier.store.runs)
    window.docks.reveal("runs")
    table = window.runs.table
    yield "the list of runs", lambda: driver.on_screen(table) and table.model().rowCount() == 2
    seen["status"] = driver.on_screen(window.statusBar())
    index = table.model().index(1, 0)  # below the name of the model
    at = table.viewport().mapToGlobal(table.visualRect(index).center())
    driver.user.click(at.x(), at.y())
    yield "its text", lambda: window.tokens.copy_text()
    seen["text"] = window.tokens.copy_text()
    driver.user.press("Control_L", "q")
    yield "the end", lambda: False


def stopwatch(driver: Driver) -> Story:
    """Ask four questions of a window that was never opened before, and count the clicks."""
    from app.engine_thread.events import State

    seen, window = driver.seen, driver.window
    yield "the model", lambda: window.bridge.can_start and driver.on_screen(window)
    driver.choose("run.start")
    card = window.tokens.end_card
    yield "the card at its end", lambda: driver.on_screen(card)
    yield "its audit", lambda: "equal to plain decoding" in card.audit.text()
    seen["audit"], driver.clicks = card.audit.text(), 0

    driver.choose("run.compare")
    yield "the lanes", lambda: window.bridge.live is not None and window.bridge.live.facts.lane
    yield "their end", lambda: window.bridge.state is State.READY
    header = window.divergence.header
    shown = header.sentence, header.cost, header.cards
    yield "what came of it", lambda: all(one.isVisible() for one in shown)
    yield "all of it", lambda: all(not one.visibleRegion().isEmpty() for one in shown)
    seen["right"] = driver.clicks, header.sentence.text()
    seen["cost"] = 0, header.cost.text()

    driver.clicks = 0
    driver.choose_tab("Stream")
    yield "the layout Stream", lambda: window.docks.layout_name == "stream"
    yield "its tabs", lambda: driver.tabs("Acceptance and time")
    driver.choose_tab("Acceptance and time")
    yield "acceptance", lambda: driver.on_screen(window.docks.view("acceptance"))
    yield "curves in it", lambda: _coloured(window, "acceptance") >= _CURVE
    seen["acceptance"] = driver.clicks

    driver.clicks = 0
    (menus,) = window.findChildren(QMenuBar)
    file = menus.actions()[0]
    driver.click_at(menus, menus.actionGeometry(file).center())
    menu = file.menu()
    yield "the menu File", lambda: driver.on_screen(menu)
    driver.click_at(menu, menu.actionGeometry(window.actions_by_id["file.share"]).center())
    yield "a message", lambda: [b for b in window.banners.banners if "written to" in b.message]
    seen["share"] = driver.clicks
    driver.user.press("Control_L", "q")
    yield "the end", lambda: False


def _plot_buttons(driver: Driver) -> list[str]:
    from app.window.menus import TitleButton

    found = driver.window.findChildren(TitleButton)
    return sorted(button.accessibleName() for button in found if driver.on_screen(button))


def _coloured(window: MainWindow, name: str) -> int:
    """How many pixels of a plot are neither ground nor axis nor text, which are grey."""
    image = window.panels.plots[name].plot.grab().toImage()
    image = image.convertToFormat(QImage.Format.Format_RGB32)
    channels = np.frombuffer(image.constBits(), np.uint8).reshape(-1, 4)[:, :3].astype(int)
    return int((np.ptp(channels, axis=1) > _GREY).sum())


STORIES = {"first": first_start, "second": second_start, "stopwatch": stopwatch}


def main() -> int:
    """Run the program with a driver next to it."""
    from app.__main__ import main as draftscope

    story, out, *arguments = sys.argv[1:]
    app = QApplication(["draftscope"])
    driver = Driver(app, STORIES[story], Path(out))
    status = draftscope(arguments)
    Path(out).write_text(json.dumps(driver.seen), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
