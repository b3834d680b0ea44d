"""Docks around the text: those below keep their share of the window's height when it is resized,
and thin lines part neighbours of one colour.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from PySide6.QtCore import QChildEvent, QEvent, QObject, QPoint, QRect, QSize, Qt
from PySide6.QtGui import QGuiApplication, QPainter, QPaintEvent, QPalette, QResizeEvent
from PySide6.QtWidgets import QDockWidget, QMainWindow, QStyle, QTabBar

from app.looks.tabs import mark_front_tab

_LEFT, _RIGHT = Qt.DockWidgetArea.LeftDockWidgetArea, Qt.DockWidgetArea.RightDockWidgetArea
_BOTTOM = Qt.DockWidgetArea.BottomDockWidgetArea
_OFFSET = 24
_FLOATING = QSize(420, 260)
"""A floating dock is at least so large."""


class DockShares(QObject):
    """Qt gives all new room to the centre: in a window that is maximised, plots would stay as low
    as they were in the small one. A height that the user has dragged is the share from then on."""

    def __init__(self, window: QMainWindow, docks: Mapping[str, QDockWidget]) -> None:
        super().__init__(window)
        self._window, self._docks = window, docks
        self._shares: dict[str, float] = {}
        self._given: dict[str, tuple[int, int]] = {}
        """Heights that were asked for, and those that Qt gave."""
        self._right_share, self._right_given = 0.0, -1
        self._dragged = self._skips = False
        window.installEventFilter(self)

    def placed(self, shares: Mapping[str, float]) -> None:
        """The docks have these parts of the window's height, between 0 and 1."""
        self._shares, self._given = dict(shares), {}
        self._skips = False
        self._share_out()

    def restored(self) -> None:
        """The docks are where they were left. Qt itself brings their heights back once more when
        it maximises a window that was closed so."""
        self._shares, self._given = {}, {}
        self._skips = self._window.isMaximized() and not self._window.isVisible()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.MouseButtonRelease:
            self._dragged = True  # a separator: nothing else of the window itself takes the mouse
        elif isinstance(event, QResizeEvent):
            dock = self._on_widened(event.oldSize().width(), event.size().width())
            self._on_resized(event.oldSize().height(), event.size().height())
            if dock is not None:
                self._lay_out()
                self._right_given = dock.width()
        return super().eventFilter(watched, event)

    def _on_widened(self, before: int, after: int) -> QDockWidget | None:
        """Docks at the right keep their share too: in a window made small, one from the time when
        it was large would leave no room for the text. The one that is to be laid out anew."""
        right = self._in_sight(_RIGHT)
        if before <= 0 or before == after or not right or self._skips:
            return None
        dock = next(iter(right.values()))
        if dock.width() != self._right_given:
            self._right_share = dock.width() / before
        left = list(self._in_sight(_LEFT).values())[:1]
        docks = [*left, dock]
        widths = [*(one.width() for one in left), round(self._right_share * after)]
        self._window.resizeDocks(docks, widths, Qt.Orientation.Horizontal)
        return dock

    def _lay_out(self) -> None:
        layout = self._window.layout()
        assert layout is not None
        layout.activate()  # else the docks had their new sizes only after the next events

    def _on_resized(self, before: int, after: int) -> None:
        """The docks have been laid out for the new size when a filter hears of it."""
        if before == after:
            return
        if before > 0:
            skips, self._skips = self._skips, False
            if skips:
                return
            self._take_in(before, shrinks=after < before)
        self._share_out()

    def _take_in(self, height: int, *, shrinks: bool) -> None:
        """Shares from heights in a window so high, where they are not those given last: pixels
        are rounded, and a dock may have been squeezed just now."""
        for name, dock in self._in_sight().items():
            asked, given = self._given.get(name, (self._bar_height(dock), 0))
            found = dock.height()
            squeezed = shrinks and not self._dragged and name in self._given and found < given
            if found != given and not squeezed:
                self._shares[name] = (asked + found - given) / height
        self._dragged = False

    def _share_out(self) -> None:
        docks = {n: dock for n, dock in self._in_sight().items() if n in self._shares}
        asked = {name: round(self._shares[name] * self._window.height()) for name in docks}
        if docks:
            self._window.resizeDocks(
                list(docks.values()), list(asked.values()), Qt.Orientation.Vertical
            )
            self._lay_out()
        self._given = {name: (asked[name], dock.height()) for name, dock in docks.items()}

    def _bar_height(self, dock: QDockWidget) -> int:
        """Height of the tabs below a dock, which Qt counts as a part of it."""
        if not self._window.tabifiedDockWidgets(dock):
            return 0
        bars = self._window.findChildren(QTabBar, options=Qt.FindChildOption.FindDirectChildrenOnly)
        return max((bar.height() for bar in bars if bar.isVisible()), default=0)

    def _in_sight(self, area: Qt.DockWidgetArea = _BOTTOM) -> dict[str, QDockWidget]:
        """Docks of an area that are on top of their tabs; Qt keeps the others off the window."""
        window = self._window
        return {
            name: dock
            for name, dock in self._docks.items()
            if window.dockWidgetArea(dock) is area
            and not dock.isHidden()
            and not dock.isFloating()
            and dock.geometry().right() >= 0
        }


class DockTabs(QObject):
    """Tabs of docks: that in front is marked, and their whole titles scroll where there are too
    many: of a title cut by Qt there is one letter left."""

    def __init__(self, window: QMainWindow) -> None:
        super().__init__(window)
        window.installEventFilter(self)

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        if isinstance(event, QChildEvent) and event.type() is QEvent.Type.ChildPolished:
            bar = event.child()
            if isinstance(bar, QTabBar):
                mark_front_tab(bar)
                bar.setElideMode(Qt.TextElideMode.ElideNone)
                bar.setUsesScrollButtons(True)
        return False


class DockFloats(QObject):
    """A dock that its button or key takes out of the window opens next to its place: Qt puts it
    where it was last, or in a corner of the screen. docks: all that the window has."""

    def __init__(self, window: QMainWindow, docks: Collection[QDockWidget]) -> None:
        super().__init__(window)
        self.rests = False
        """While docks are put back, each in its own place."""
        self._places: dict[QDockWidget, QRect] = {}
        for dock in docks:
            dock.installEventFilter(self)
            dock.topLevelChanged.connect(lambda floats, at=dock: self._place(at, floats))

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() in (QEvent.Type.Move, QEvent.Type.Resize):
            assert isinstance(watched, QDockWidget)
            if not watched.isFloating() and watched.geometry().right() >= 0:
                at = watched.mapToGlobal(QPoint())
                self._places[watched] = QRect(at, watched.size())
        return False

    def _place(self, dock: QDockWidget, floats: bool) -> None:
        place = self._places.get(dock)
        if not floats or place is None or self.rests or QGuiApplication.mouseButtons():
            return  # with a button pressed it is being dragged
        room = dock.screen().availableGeometry()
        size = place.size().expandedTo(_FLOATING).boundedTo(room.size())
        box = QRect(place.topLeft() + QPoint(_OFFSET, _OFFSET), size)
        box.moveRight(min(box.right(), room.right()))
        box.moveBottom(min(box.bottom(), room.bottom()))
        dock.setGeometry(box)


class DockLines(QObject):
    """Draws in the middle of the window's separators. A style sheet could do it too, but would
    slow every widget down, and so would a style in Python. docks: all that the window has."""

    def __init__(self, window: QMainWindow, docks: Collection[QDockWidget]) -> None:
        super().__init__(window)
        self._window, self._docks = window, docks
        window.installEventFilter(self)

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        if isinstance(event, QPaintEvent):
            self._paint(event.rect())  # Qt's handles come over it
        return False

    def _areas(self) -> list[QRect]:
        window = self._window
        areas = [
            dock.geometry()
            for dock in self._docks
            if not dock.isHidden()
            and not dock.isFloating()
            and window.rect().contains(dock.geometry().center())
        ]
        centre = window.centralWidget()
        return areas if centre is None else [centre.geometry(), *areas]

    def _paint(self, part: QRect) -> None:
        areas = self._areas()
        if any(area.contains(part) for area in areas):
            return  # something in a panel that lets the window shine through
        inside = QRect()
        for area in areas:
            inside = inside.united(area)
        extent = self._window.style().pixelMetric(
            QStyle.PixelMetric.PM_DockWidgetSeparatorExtent, None, None
        )
        after = extent // 2
        before = extent - after
        painter = QPainter(self._window)
        painter.setClipRect(inside)
        painter.setPen(self._window.palette().color(QPalette.ColorRole.Mid))
        for area in areas:  # frames of neighbours share the pixel between them
            painter.drawRect(area.adjusted(-before, -before, after, after))
        painter.end()
