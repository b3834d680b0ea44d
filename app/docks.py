"""The docks around the token stream: names, first places, and how the layout is kept."""

from __future__ import annotations

from PySide6.QtCore import QByteArray, QSignalBlocker, Qt
from PySide6.QtWidgets import QDockWidget, QMainWindow, QTabBar, QTabWidget, QWidget

LAYOUT_VERSION = 3
"""Raise it when docks come, go or change their names: an older saved layout is then ignored."""

TITLES = {
    "model": "Model",
    "run": "Run",
    "rollback": "Rollback depth",
    "ring": "Ring occupancy",
    "divergence": "Divergence",
    "findings": "Findings",
    "acceptance": "Acceptance",
    "timing": "Time per round",
    "verify": "Verify width",
    "kv": "KV cells",
    "what_if": "What if",
}
_BOTTOM_TABS = ("ring", "acceptance", "timing", "verify", "kv", "what_if")
FIRST_SHOWN = ("model", "run", "rollback", *_BOTTOM_TABS)
"""The panels that a new window has; the others are tabs at the right, opened when wanted."""
_FIRST_SIZE = (1280, 800)
_LEFT_CHARACTERS = 52
_BOTTOM_SHARE = 0.17
_RUN_SHARE = 0.5
_RIGHT_SHARE = 0.5


class Docks:
    """All docks of a window. Their widgets are set later, with `fill`."""

    def __init__(self, window: QMainWindow) -> None:
        self._window = window
        self._docks: dict[str, QDockWidget] = {}
        for name, title in TITLES.items():
            dock = QDockWidget(title, window)
            dock.setObjectName(f"dock.{name}")
            self._docks[name] = dock
        window.setDockNestingEnabled(True)
        window.setCorner(Qt.Corner.BottomLeftCorner, Qt.DockWidgetArea.LeftDockWidgetArea)
        window.setCorner(Qt.Corner.BottomRightCorner, Qt.DockWidgetArea.RightDockWidgetArea)
        window.setTabPosition(Qt.DockWidgetArea.RightDockWidgetArea, QTabWidget.TabPosition.North)

    def __getitem__(self, name: str) -> QDockWidget:
        return self._docks[name]

    def fill(self, name: str, widget: QWidget) -> None:
        """Put a view into its dock."""
        self._docks[name].setWidget(widget)

    def reset(self) -> None:
        """Every dock in its first place, the window in its first size."""
        window, docks = self._window, self._docks
        left, bottom = Qt.DockWidgetArea.LeftDockWidgetArea, Qt.DockWidgetArea.BottomDockWidgetArea
        in_place = self._tabs_in_place()
        places = [("model", left), ("run", left), ("rollback", bottom), ("ring", bottom)]
        for name, area in places[:2] if in_place else places:
            docks[name].setFloating(False)
            window.addDockWidget(area, docks[name])
            docks[name].show()
        self._reset_tabs()
        window.splitDockWidget(docks["model"], docks["run"], Qt.Orientation.Vertical)
        if not in_place:
            window.splitDockWidget(docks["rollback"], docks["ring"], Qt.Orientation.Vertical)
            for name in _BOTTOM_TABS[1:]:
                docks[name].setFloating(False)
                window.addDockWidget(bottom, docks[name])
                window.tabifyDockWidget(docks["ring"], docks[name])
                docks[name].show()
        for name in _BOTTOM_TABS:
            docks[name].show()
        docks["ring"].raise_()
        height = window.height()
        width = _LEFT_CHARACTERS * window.fontMetrics().averageCharWidth()
        window.resizeDocks([docks["model"]], [width], Qt.Orientation.Horizontal)
        for names, share in ((("model", "run"), _RUN_SHARE), (("rollback", "ring"), _BOTTOM_SHARE)):
            window.resizeDocks(
                [docks[name] for name in names],
                [round(height * share)] * len(names),
                Qt.Orientation.Vertical,
            )
        if not in_place:
            self._empty_left_bars()

    def _empty_left_bars(self) -> None:
        """Qt leaves a bar behind with the first tabs of a group; without tabs it is not seen."""
        bars = self._window.findChildren(QTabBar, options=Qt.FindChildOption.FindDirectChildrenOnly)
        first = TITLES[_BOTTOM_TABS[0]]
        for bar in bars:
            if bar.tabText(0) == first and bar.count() < len(_BOTTOM_TABS):
                with QSignalBlocker(bar):
                    while bar.count():
                        bar.removeTab(0)

    def _tabs_in_place(self) -> bool:
        """Whether the plots at the bottom are where they were first; see `_reset_tabs`."""
        docks, bottom = self._docks, Qt.DockWidgetArea.BottomDockWidgetArea
        names = ("rollback", *_BOTTOM_TABS)
        if any(docks[name].isFloating() for name in names):
            return False
        if any(self._window.dockWidgetArea(docks[name]) is not bottom for name in names):
            return False
        together = self._window.tabifiedDockWidgets(docks["ring"])
        return {docks[name] for name in _BOTTOM_TABS[1:]} == set(together)

    def _reset_tabs(self) -> None:
        """The docks at the right: tabs, closed. Qt leaves a bar behind where tabs are docked
        anew, so those that are in place stay there."""
        first, second = self._docks["divergence"], self._docks["findings"]
        right = Qt.DockWidgetArea.RightDockWidgetArea
        areas = {self._window.dockWidgetArea(dock) for dock in (first, second)}
        floats = first.isFloating() or second.isFloating()
        together = second in self._window.tabifiedDockWidgets(first)
        for dock in (first, second):
            dock.hide()
            dock.setFloating(False)
        if areas != {right} or floats or not together:
            self._window.addDockWidget(right, first)
            self._window.tabifyDockWidget(first, second)

    def reveal(self, *names: str) -> None:
        """Open tabs at the right, the first of them on top; if all were closed they get half
        the window, and the panels at the left keep their width."""
        window, first, left = self._window, self._docks[names[0]], self._docks["model"]
        opens = not any(self._docks[name].isVisible() for name in names)
        for name in names:
            self._docks[name].show()
        first.raise_()
        if opens and not first.isFloating():
            widths = [left.width(), round(window.width() * _RIGHT_SHARE)]
            window.resizeDocks([left, first], widths, Qt.Orientation.Horizontal)

    def count(self, name: str, n: int) -> None:
        """Say in a panel's title how many entries it has."""
        action = self._docks[name].toggleViewAction()
        text = action.text()
        self._docks[name].setWindowTitle(f"{TITLES[name]} ({n:,})" if n else TITLES[name])
        action.setText(text)  # Qt has just made it the title

    def restore(self, geometry: QByteArray, layout: QByteArray) -> None:
        """The places of the last time, or the first ones."""
        window = self._window
        if geometry.isEmpty() or not window.restoreGeometry(geometry):
            window.resize(*_FIRST_SIZE)
        if layout.isEmpty() or not window.restoreState(layout, LAYOUT_VERSION):
            self.reset()

    def save(self) -> tuple[QByteArray, QByteArray]:
        """Geometry and layout for `restore`."""
        return self._window.saveGeometry(), self._window.saveState(LAYOUT_VERSION)
