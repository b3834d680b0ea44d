"""The area of docks around the text: names, shared docks, the named layouts, and the order of Tab.
Docks below keep their share of the window's height when it is resized, and thin lines separate
neighbours."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from PySide6.QtCore import QChildEvent, QEvent, QObject, QPoint, QRect, QSize, Qt, Signal
from PySide6.QtGui import QGuiApplication, QPainter, QPaintEvent, QPalette, QResizeEvent
from PySide6.QtWidgets import (
    QAbstractScrollArea,
    QApplication,
    QDockWidget,
    QLabel,
    QMainWindow,
    QScrollArea,
    QStyle,
    QTabBar,
    QVBoxLayout,
    QWidget,
)

from app.looks import mark_front_tab
from app.widgets.build import made, vbox

TITLES = {
    "model": "Model",
    "run": "Run",
    "rollback": "Rollback depth",
    "memory": "Memory",
    "divergence": "Divergence",
    "findings": "Findings",
    "inspector": "Step inspector",
    "runs": "Runs",
    "lab": "Lab",
    "conversation": "Conversation",
    "speed": "Acceptance and time",
    "tuning": "Tune",
}
PAGES = {
    "memory": {"ring": "Ring occupancy", "kv": "KV cells"},
    "lab": {
        "faults": "Faults and rates",
        "breaks": "Break rules",
        "gate": "Gate",
        "conform": "Kernels",
    },
    "speed": {"acceptance": "Acceptance", "timing": "Time per round", "verify": "Verify width"},
    "tuning": {
        "tune": "Draft lengths",
        "what_if": "What if",
        "drafter": "Drafter",
        "results": "Results",
    },
}
"""Names and titles of views that share a dock; every other dock holds the view of its name."""
DOCK_OF = {page: dock for dock, pages in PAGES.items() for page in pages}
PLOTS = ("speed",)
"""Docks of further plots, tabs of the last bottom one."""


@dataclass(frozen=True, slots=True)
class DockLayout:
    """Initial places of the docks, and which of them are open.

    left and bottom: docks from top to bottom; further plots are tabs of the last of them, every
    other dock is a tab on the right. Bottom docks have their share of the window's height when
    open; right_share: of the width. wide: the bottom docks span the window; if that is low, many of
    them form two columns and the left docks are tabs. stack: the pages of a bottom dock are
    stacked.
    """

    title: str
    left: tuple[str, ...]
    bottom: Mapping[str, float]
    shown: tuple[str, ...]
    right_share: float = 0.5
    wide: bool = False
    stack: bool = False


LAYOUTS = {
    "stream": DockLayout(
        "Stream",
        ("model", "run"),
        {"rollback": 0.16, "memory": 0.2},
        ("model", "run", "rollback", "memory", *PLOTS),
    ),
    "rollback": DockLayout(
        "Rollback",
        ("run", "model"),
        {"rollback": 0.32, "memory": 0.34},
        ("run", "rollback", "memory", *PLOTS),
    ),
    "divergence": DockLayout(
        "Divergence", ("run", "model"), {"divergence": 0.68}, ("divergence", "findings"), wide=True
    ),
    "tune": DockLayout("Tune", ("run", "model"), {"tuning": 0.62}, ("run", "tuning"), wide=True),
    "plots": DockLayout(
        "Plots",
        ("run", "model"),
        {"rollback": 0.105, "memory": 0.215, "speed": 0.35},
        ("run", "rollback", "memory", "speed"),
        wide=True,
        stack=True,
    ),
}
"""The text is at the centre of all of them; each gives most room to what it is named after."""


def known_layout(name: str) -> str:
    """The layout of this name, the first one if there is none."""
    return name if name in LAYOUTS else next(iter(LAYOUTS))


_LEFT, _RIGHT = Qt.DockWidgetArea.LeftDockWidgetArea, Qt.DockWidgetArea.RightDockWidgetArea
_BOTTOM = Qt.DockWidgetArea.BottomDockWidgetArea
_OFFSET = 24
_FLOATING = QSize(420, 260)
"""Least size of a floating dock."""


def lay_out(window: QMainWindow) -> None:
    """Lay out now: before the next events docks have no new sizes, nor can the window shrink."""
    layout = window.layout()
    assert layout is not None
    layout.activate()


class DockShares(QObject):
    """Keeps shares of height: Qt gives all new room to the centre, so plots would stay low in a
    maximised window. A height dragged by the user is the new share."""

    def __init__(self, window: QMainWindow, docks: Mapping[str, QDockWidget]) -> None:
        super().__init__(window)
        self._window, self._docks = window, docks
        self._shares: dict[str, float] = {}
        self._given: dict[str, tuple[int, int]] = {}
        """Requested heights, and those that Qt gave."""
        self._right_share, self._right_given = 0.0, -1
        self._dragged = self._skips = False
        self._left_at: QSize | None = None
        """Window size when the docks were saved, until they are laid out in this window."""
        window.installEventFilter(self)

    def placed(self, shares: Mapping[str, float]) -> None:
        """Set the docks' shares of the window's height, between 0 and 1."""
        self._shares, self._given = dict(shares), {}
        self._skips = False
        self._share_out()

    def restored(self, size: QSize) -> None:
        """The docks were restored as saved in a window of this size. Qt itself restores their
        heights again when it maximises a window that was closed maximised."""
        self._shares, self._given, self._left_at = {}, {}, size
        self._skips = self._window.isMaximized() and not self._window.isVisible()

    def fit_restored(self) -> None:
        """Keep the shares of restored docks once they are laid out with their saved sizes."""
        size, self._left_at = self._left_at, None
        if size is not None:
            self._skips = False
            self._resize(size, self._window.size())

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.MouseButtonRelease:
            self._dragged = True  # a separator: nothing else in the window itself takes the mouse
        elif isinstance(event, QResizeEvent):
            self._resize(event.oldSize(), event.size())
        return super().eventFilter(watched, event)

    def _resize(self, before: QSize, after: QSize) -> None:
        dock = self._on_widened(before.width(), after.width())
        self._on_resized(before.height(), after.height())
        if dock is not None:
            lay_out(self._window)
            self._right_given = dock.width()

    def _on_widened(self, before: int, after: int) -> QDockWidget | None:
        """Docks on the right keep their share, too: in a window made small, a wide one would leave
        no room for the text. Returns the dock to lay out again."""
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

    def _on_resized(self, before: int, after: int) -> None:
        """Called by a filter after the docks were laid out for the new size."""
        if before == after:
            return
        if before > 0:
            skips, self._skips = self._skips, False
            if skips:
                return
            self._take_in(before, shrinks=after < before)
        self._share_out()

    def _take_in(self, height: int, *, shrinks: bool) -> None:
        """Update shares from heights in a window of this height, unless they are as last requested:
        pixels are rounded, and a dock may have been squeezed."""
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
            lay_out(self._window)
        self._given = {name: (asked[name], dock.height()) for name, dock in docks.items()}

    def _bar_height(self, dock: QDockWidget) -> int:
        """Height of the tabs below a dock, which Qt includes in the dock's."""
        if not self._window.tabifiedDockWidgets(dock):
            return 0
        bars = self._window.findChildren(QTabBar, options=Qt.FindChildOption.FindDirectChildrenOnly)
        return max((bar.height() for bar in bars if bar.isVisible()), default=0)

    def _in_sight(self, area: Qt.DockWidgetArea = _BOTTOM) -> dict[str, QDockWidget]:
        """Docks of an area on top of their tabs; Qt keeps the others outside the window."""
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
    """Marks the front tab of docks, whose bars Qt makes."""

    def __init__(self, window: QMainWindow) -> None:
        super().__init__(window)
        window.installEventFilter(self)

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        if isinstance(event, QChildEvent) and event.type() is QEvent.Type.ChildPolished:
            bar = event.child()
            if isinstance(bar, QTabBar):
                mark_front_tab(bar)
                bar.setAccessibleName("Panels")
        return False


class DockFloats(QObject):
    """Opens a floating dock next to its former place: Qt puts it where it was last, or in a corner
    of the screen. docks: all of the window's."""

    def __init__(self, window: QMainWindow, docks: Collection[QDockWidget]) -> None:
        super().__init__(window)
        self.rests = False
        """While docks are restored to their places."""
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
    """Draws lines in the middle of the window's separators. A style sheet would slow down every
    widget, and so would a Python style. docks: all of the window's."""

    def __init__(self, window: QMainWindow, docks: Collection[QDockWidget]) -> None:
        super().__init__(window)
        self._window, self._docks = window, docks
        window.installEventFilter(self)

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        if isinstance(event, QPaintEvent):
            self._paint(event.rect())  # Qt paints its handles over it
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
            return  # a transparent part of a panel
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
        for area in areas:  # frames of neighbours share a pixel
            painter.drawRect(area.adjusted(-before, -before, after, after))
        painter.end()


def key_stops(part: QWidget) -> list[QWidget]:
    """The widgets in `part` that take Tab, itself included, in reading order; and the focus widget,
    even if it was just hidden or disabled."""
    at = QApplication.focusWidget()
    if at is not None and part.isHidden() and part.isAncestorOf(at):
        return [at]
    stops = [part] if _takes_tab(part) else []
    inside = [child for child in part.children() if isinstance(child, QWidget)]
    for child in _as_read([child for child in inside if _is_reached(child, part)]):
        stops += key_stops(child)
    return stops


def move_keys(window: QWidget, by: int) -> bool:
    """Move the focus to the next stop (by 1) or the previous one (-1); returns whether there is
    any."""
    stops, at = key_stops(window), QApplication.focusWidget()
    if not stops:
        return False
    stop = stops[(stops.index(at) + by) % len(stops) if at in stops else min(by, 0)]
    reason = Qt.FocusReason.TabFocusReason if by > 0 else Qt.FocusReason.BacktabFocusReason
    stop.setFocus(reason)
    around = stop.parentWidget()
    while around is not None:
        if isinstance(around, QScrollArea):
            around.ensureWidgetVisible(stop)
        around = around.parentWidget()
    return True


def _takes_tab(widget: QWidget) -> bool:
    if widget is QApplication.focusWidget():
        return True
    hints, policy = QGuiApplication.styleHints(), Qt.FocusPolicy
    everything = hints.tabFocusBehavior() is Qt.TabFocusBehavior.TabFocusAllControls
    wanted = policy.TabFocus if everything else policy.StrongFocus
    takes = widget.focusPolicy() & wanted == wanted
    return takes and widget.isEnabled() and widget.focusProxy() is None


def _is_reached(child: QWidget, part: QWidget) -> bool:
    """Whether a child of a widget is visible, or scrolls into view. Qt moves the contents of
    covered tabs, and obsolete tab bars, outside the window instead of hiding them."""
    at = QApplication.focusWidget()
    if at is not None and (child is at or child.isAncestorOf(at)):
        return True
    if child.isHidden() or child.isWindow():
        return False
    scrolls = isinstance(part.parent(), QAbstractScrollArea)
    return scrolls or child.geometry().intersects(part.rect())


def _as_read(parts: list[QWidget]) -> list[QWidget]:
    """Rows from top to bottom if horizontal lines separate them, else columns from left to
    right."""
    for start, end in ((QRect.top, QRect.bottom), (QRect.left, QRect.right)):
        groups, edge = list[list[QWidget]](), 0
        for part in sorted(parts, key=lambda part: start(part.geometry())):
            box = part.geometry()
            if not groups or start(box) > edge:
                groups.append([])
                edge = start(box)
            groups[-1].append(part)
            edge = max(edge, end(box))
        if len(groups) > 1:
            return [part for group in groups for part in _as_read(group)]
    return parts


_INDENT = 6


class Pages(QWidget):
    """Pages by name, empty until `fill` puts a view on them. titles: of the pages. `turned`:
    another page is in front."""

    turned = Signal()

    def __init__(self, titles: Mapping[str, str]) -> None:
        super().__init__()
        self._names = tuple(titles)
        self._views: dict[str, QWidget] = {}
        self._pages: dict[str, QWidget] = {}
        self._heads: list[QLabel] = []
        self._is_stack = False
        self.bar = made(QTabBar, accessibleName="Pages: " + ", ".join(titles.values()))
        mark_front_tab(self.bar)
        self.bar.setExpanding(False)
        self.bar.setDrawBase(False)
        whole = vbox(self.bar, of=self, margins=(0, 0, 0, 0), spacing=0)
        for name, title in titles.items():
            self.bar.addTab(title)
            self._heads.append(head := QLabel(title))
            head.setIndent(_INDENT)
            page = self._pages[name] = QWidget()
            vbox(head, of=page, margins=(0, 0, 0, 0), spacing=0)
            whole.addWidget(page, 1)
        self.bar.currentChanged.connect(self._arrange)
        self._arrange()

    @property
    def current(self) -> str:
        return self._names[self.bar.currentIndex()]

    def view(self, name: str) -> QWidget | None:
        return self._views.get(name)

    def fill(self, name: str, view: QWidget) -> None:
        self._views[name] = view
        column = self._pages[name].layout()
        assert isinstance(column, QVBoxLayout)
        column.addWidget(view, 1)
        view.show()  # at once: Qt would show it later, and until then nothing in it takes the focus

    def shows(self, name: str) -> bool:
        """Whether a page is shown if the panel is."""
        return self._is_stack or name == self.current

    def turn_to(self, name: str) -> None:
        self.bar.setCurrentIndex(self._names.index(name))

    def set_stack(self, wanted: bool) -> None:
        """Stack all pages, each under its title, or show one at a time."""
        if wanted is not self._is_stack:
            self._is_stack = wanted
            self._arrange()

    def _arrange(self, *_: object) -> None:
        self.bar.setVisible(not self._is_stack)
        for head in self._heads:
            head.setVisible(self._is_stack)
        for name in sorted(self._names, key=self.shows):  # hide it first, to make room
            self._pages[name].setVisible(self.shows(name))
        self.turned.emit()
