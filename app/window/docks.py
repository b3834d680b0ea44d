"""The docks around the token stream, placed by named layouts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from itertools import pairwise

from PySide6.QtCore import (
    QByteArray,
    QCoreApplication,
    QEvent,
    QObject,
    QSize,
    Qt,
    QTimer,
    SignalInstance,
)
from PySide6.QtGui import QAction
from PySide6.QtWidgets import (
    QAbstractButton,
    QApplication,
    QDockWidget,
    QMainWindow,
    QTabBar,
    QTabWidget,
    QWidget,
)

from app.engine_thread.feed import timer
from app.looks import Theme, icon
from app.widgets.build import made
from app.widgets.fields import WheelGuard
from app.widgets.fitted_labels import LowPanel
from app.window.dock_area import (
    DOCK_OF,
    LAYOUTS,
    PAGES,
    PLOTS,
    TITLES,
    DockFloats,
    DockLayout,
    DockLines,
    DockShares,
    DockTabs,
    Pages,
    key_stops,
    lay_out,
)
from app.window.menus import TitleNote

_HIGH = ("runs", "lab", "conversation", "tuning")
"""Docks whose contents do not fit every place; the other panels scroll."""

LAYOUT_VERSION = zlib.crc32(" ".join(sorted((*TITLES, *DOCK_OF))).encode()) >> 1
"""A saved layout of another version has other docks and is ignored."""

_FIRST_SIZE = (1280, 800)
_MANY, _LOW_LINES = 3, 53
"""Number of docks, and the window height in lines from which that many can be stacked."""
_LEFT_CHARACTERS = 52
_RUN_SHARE = 0.5
_INSPECTOR_CHARACTERS = 60
_LANES_CHARACTERS = 110
_INSPECTOR_SHARE = 0.26
_TEXT_CHARACTERS = 44
"""Width left for the text by panels that open on the right, if possible, characters."""
_LEAST_SHARE = 0.4
"""Their least share of the text's width."""

_LEFT, _RIGHT = Qt.DockWidgetArea.LeftDockWidgetArea, Qt.DockWidgetArea.RightDockWidgetArea
_BOTTOM = Qt.DockWidgetArea.BottomDockWidgetArea


class _Shortcut(QObject):
    """A dock's shortcut: it moves the focus to a visible dock, if anything there takes it; else it
    does what the menu does."""

    def __init__(self, docks: Docks, name: str, dock: QDockWidget) -> None:
        super().__init__(dock)
        self._docks, self._name, self._dock = docks, name, dock

    def eventFilter(self, action: QObject, event: QEvent) -> bool:
        if event.type() is not QEvent.Type.Shortcut or not action.property("checked"):
            return False
        at = QApplication.focusWidget()
        has_keys = at is not None and self._dock.isAncestorOf(at)
        return not has_keys and self._docks.enter(self._name)


_BUTTONS = (
    ("float", "float", "Undock the panel from the window, or dock it again"),
    ("close", "close", "Close the panel"),
)
"""Buttons in a dock's title: Qt's name, the drawing, and the tooltip."""
_TURN_MS = 1
"""With 0 Qt would continue in the same turn of the event loop."""


class Docks:
    """All docks of a window. Their widgets are set later by `fill`."""

    def __init__(self, window: QMainWindow) -> None:
        self.window = window
        self._theme: Theme | None = None
        self._docks: dict[str, QDockWidget] = {}
        self._notes: dict[str, TitleNote] = {}
        self._pages: dict[str, Pages] = {}
        self._makers: dict[str, Callable[[], object]] = {}
        self._moves = False
        """Whether docks are being moved."""
        self._has_made = False
        self._making = timer(window, self._make_seen, _TURN_MS, once=True)
        self.is_making = self._making.isActive
        """Whether views of visible docks are still to be made."""
        self.layout_name = next(iter(LAYOUTS))
        for name, title in TITLES.items():
            dock = made(QDockWidget, title, window, objectName=f"dock.{name}")
            self._docks[name] = dock
            dock.topLevelChanged.connect(lambda _: self.draw_buttons(self._theme))
            self._notes[name] = TitleNote(dock)
            if name in PAGES:
                pages = self._pages[name] = Pages(PAGES[name])
                dock.setWidget(LowPanel(pages) if name in _HIGH else pages)
                pages.turned.connect(self._making.start)
        window.setDockNestingEnabled(True)
        # in one step: with animations each new layout of the window takes several
        window.setAnimated(False)
        window.setTabPosition(_RIGHT, QTabWidget.TabPosition.North)
        self._shares = DockShares(window, self._docks)
        DockLines(window, self._docks.values())
        DockTabs(window)
        self._floats = DockFloats(window, self._docks.values())

    def draw_buttons(self, theme: Theme | None) -> None:
        """Tint the title buttons and set their tooltips. Qt draws its own icons, too dark for a
        dark theme, whenever a dock floats or returns, or a layout is restored."""
        self._theme = theme
        if theme is None:
            return
        for dock in self._docks.values():
            for name, drawing, tip in _BUTTONS:
                for button in dock.findChildren(QAbstractButton, f"qt_dockwidget_{name}button"):
                    button.setIcon(icon(drawing, theme, "ui.muted"))
                    button.setToolTip(tip)

    def __getitem__(self, name: str) -> QDockWidget:
        """A dock by its name, or by the name of a view in it."""
        return self._docks[DOCK_OF.get(name, name)]

    def _shared(self, name: str) -> Pages | None:
        """The pages of a dock, or of the one that a view shares."""
        return self._pages.get(DOCK_OF.get(name, name))

    @property
    def pages(self) -> list[str]:
        """Names of the front views of shared docks."""
        return [pages.current for pages in self._pages.values()]

    def turned(self) -> list[SignalInstance]:
        """Signals that the front pages of docks have changed."""
        return [pages.turned for pages in self._pages.values()]

    def turn_to(self, names: Iterable[str]) -> None:
        """Bring these views to the front of their shared docks; unknown names are ignored."""
        for name in names:
            if name in DOCK_OF:
                self._pages[DOCK_OF[name]].turn_to(name)

    def fill(self, name: str, widget: QWidget) -> None:
        self._makers.pop(name, None)
        WheelGuard(widget)  # any of them may scroll
        pages = self._shared(name)
        if pages is None:
            self[name].setWidget(LowPanel(widget) if name in _HIGH else widget)
        else:
            pages.fill(name, widget)

    def view(self, name: str) -> QWidget | None:
        """The view set by `fill`, None before."""
        pages, panel = self._shared(name), self[name].widget()
        if pages is not None:
            return pages.view(name)
        return panel.view if isinstance(panel, LowPanel) else panel

    def front(self, name: str) -> QWidget | None:
        """The front view of a dock, or of the dock of this view."""
        pages = self._shared(name)
        return self.view(name if pages is None else pages.current)

    def fill_when_seen(self, name: str, make: Callable[[], object]) -> None:
        """Make the view of a dock once the dock is visible, by a call that fills it."""
        if self.view(name) is not None:
            return
        self._makers[name] = make
        self[name].visibilityChanged.connect(
            lambda seen: self._make(name) if seen and self._is_in_front(name) else None
        )
        if self._is_seen(name):
            self._make(name)

    def _is_in_front(self, name: str) -> bool:
        """Whether a view would be visible if its dock was."""
        pages = self._shared(name)
        return pages is None or pages.shows(name)

    def _is_seen(self, name: str) -> bool:
        """Whether a view is visible, and not covered by another tab."""
        dock = self[name]
        return self._is_in_front(name) and dock.isVisible() and dock.geometry().right() >= 0

    def _make(self, name: str) -> None:
        """Make the view of a dock, unless docks are being moved: most become visible in between."""
        make = None if self._moves else self._makers.pop(name, None)
        if make is not None:
            make()

    def _make_seen(self) -> None:
        """Make the views of visible docks, one per turn of the event loop: a plot takes as long as
        two frames."""
        if (name := next(filter(self._is_seen, self._makers), None)) is not None:
            self._make(name)
            self._has_made = True
            self._making.start()
        elif self._has_made:
            self._has_made = False
            if self.window.isVisible() and not self._fits_screen():
                self.fit_screen()

    def stop(self) -> None:
        """Make no further views: the window closes."""
        self._making.stop()

    def connect_action(self, name: str, action: QAction) -> None:
        """Let a checkable action show a dock, with the focus, and close it. It is checked while the
        dock is visible; Qt's own is also checked while another tab covers it."""
        dock = self._docks[name]
        action.triggered.connect(lambda wanted: self.enter(name) if wanted else dock.close())
        dock.visibilityChanged.connect(action.setChecked)
        action.installEventFilter(_Shortcut(self, name, dock))

    def apply(self, name: str, saved: QByteArray | None = None) -> None:
        """Apply a named layout, as saved or with its initial places."""
        size, had_keys = self.window.size(), QApplication.focusWidget()
        restored = self._take(name, saved)
        if not self.window.isVisible():
            return
        if QApplication.focusWidget() is not had_keys:  # else the next one would get the focus
            next(iter(key_stops(self.window.centralWidget())), self.window).setFocus()
        if restored:  # the room they need is known once they are laid out
            QTimer.singleShot(0, self.window, lambda: self._fit_restored(size))
        else:
            self._have_again(size)

    def _take(self, name: str, saved: QByteArray | None = None) -> bool:
        """Apply a layout; returns whether it is as saved."""
        self.layout_name = name
        self._moves = True
        try:
            return self._take_places(name, saved)
        finally:
            self._moves = False
            self._making.start()
            self.draw_buttons(self._theme)

    def _take_places(self, name: str, saved: QByteArray | None) -> bool:
        layout = LAYOUTS[name]
        self._take_down()
        for dock, pages in self._pages.items():
            pages.set_stack(layout.stack and dock in layout.bottom)
        for corner, area in (
            (Qt.Corner.BottomLeftCorner, _LEFT),
            (Qt.Corner.BottomRightCorner, _RIGHT),
        ):
            self.window.setCorner(corner, _BOTTOM if layout.wide else area)
        if saved is not None and not saved.isEmpty():
            self._floats.rests = True
            size, _, places = bytes(saved.data()).partition(b" ")
            restored = self.window.restoreState(places, LAYOUT_VERSION)
            self._floats.rests = False
            if restored:
                self._shares.restored(QSize(*map(int, size.split(b"x"))))
                return True
            self._take_down()
        self._place(layout)
        return False

    def reset(self) -> None:
        """Move every dock of the current layout to its initial place, with its first page in
        front."""
        self.turn_to([next(iter(titles)) for titles in PAGES.values()])
        self.apply(self.layout_name)

    def _take_down(self) -> None:
        """Remove every dock. Qt leaves the bars of former tabs visible."""
        for dock in self._docks.values():
            if dock.isFloating():
                dock.setFloating(False)
            self.window.removeDockWidget(dock)
        for bar in self.window.findChildren(
            QTabBar, options=Qt.FindChildOption.FindDirectChildrenOnly
        ):
            bar.hide()

    def _place(self, layout: DockLayout) -> None:
        window, docks = self.window, self._docks
        columns = self._columns(layout)
        for first in (layout.left[0], columns[0][0]):
            area = _LEFT if first in layout.left else _BOTTOM
            window.addDockWidget(area, docks[first])
        for column in columns[1:]:
            beside = docks[columns[0][0]]
            window.splitDockWidget(beside, docks[column[0]], Qt.Orientation.Horizontal)
        for names in (layout.left, *columns):
            for above, name in pairwise(names):
                if names is layout.left and layout.wide and self._is_low:
                    window.tabifyDockWidget(docks[above], docks[name])
                else:
                    window.splitDockWidget(docks[above], docks[name], Qt.Orientation.Vertical)
        below = [name for name in PLOTS if name not in layout.bottom]
        for name in below:
            window.addDockWidget(_BOTTOM, docks[name])
            window.tabifyDockWidget(docks[columns[-1][-1]], docks[name])
        tabs = [name for name in TITLES if name not in (*layout.left, *layout.bottom, *below)]
        for first, name in zip(("", *tabs[:1] * len(tabs)), tabs, strict=False):
            window.addDockWidget(_RIGHT, docks[name])
            if first:
                window.tabifyDockWidget(docks[first], docks[name])
        for name, dock in docks.items():
            dock.setVisible(name in layout.shown)
        docks[columns[-1][-1]].raise_()
        self._share_out(layout, [name for name in tabs if name in layout.shown])

    def _share_out(self, layout: DockLayout, tabs: list[str]) -> None:
        window, docks = self.window, self._docks
        width = self.characters(_LEFT_CHARACTERS)
        columns = [(docks[name], width) for name in layout.left if name in layout.shown][:1]
        columns += [(docks[name], round(window.width() * layout.right_share)) for name in tabs[:1]]
        if columns:
            window.resizeDocks(
                [dock for dock, _ in columns], [w for _, w in columns], Qt.Orientation.Horizontal
            )
        shown = [docks[name] for name in layout.left if name in layout.shown]
        if shown:
            height = round(window.height() * _RUN_SHARE)
            window.resizeDocks(shown, [height] * len(shown), Qt.Orientation.Vertical)
        stacks = self._columns(layout)
        if len(stacks) > 1:
            half = window.width() // len(stacks)
            firsts = [docks[stack[0]] for stack in stacks]
            window.resizeDocks(firsts, [half] * len(stacks), Qt.Orientation.Horizontal)
        self._shares.placed({name: len(stacks) * part for name, part in layout.bottom.items()})

    @property
    def _is_low(self) -> bool:
        return self.window.height() < _LOW_LINES * self.window.fontMetrics().height()

    def _columns(self, layout: DockLayout) -> list[tuple[str, ...]]:
        """The bottom docks from top to bottom, in one column or two."""
        names = tuple(layout.bottom)
        if len(names) < _MANY or not self._is_low:
            return [names]
        half = -(-len(names) // 2)
        return [names[:half], names[half:]]

    def characters(self, n: int) -> int:
        """Width of this many letters: a font's average may be that of letters that are rare here,
        as with Noto Sans."""
        metrics = self.window.fontMetrics()
        letters = "".join(TITLES.values())
        measured = metrics.horizontalAdvance(letters) / len(letters)
        return round(n * min(measured, metrics.averageCharWidth()))

    @property
    def is_wide(self) -> bool:
        """Whether a panel on the right has room for tables of several lanes in the current layout;
        layouts for comparisons have it below, across the window."""
        window = self.window
        if LAYOUTS[self.layout_name].wide and "divergence" in LAYOUTS[self.layout_name].bottom:
            return True
        least = self.characters(_LANES_CHARACTERS)
        return window.width() * LAYOUTS[self.layout_name].right_share >= least

    def reveal(self, *names: str) -> None:
        """Show docks or views, the first of them on top. Tabs on the right that were all closed get
        the layout's share of the width, the inspector less, as far as the text has room; the panels
        on the left keep their width."""
        window, first, left = self.window, self[names[0]], self._docks["model"]
        size = window.size()
        self.turn_to(names)
        pages = self._shared(names[0])
        self._make(names[0] if pages is None else pages.current)
        opens = not any(self._stands_at_right(dock) for dock in self._docks.values())
        lay_out(self.window)  # a panel may just have been closed
        centre = window.centralWidget().width()
        for name in names:
            self[name].show()
        first.raise_()
        if opens and self._stands_at_right(first):
            wide = round(window.width() * LAYOUTS[self.layout_name].right_share)
            if names == ("inspector",):
                least = self.characters(_INSPECTOR_CHARACTERS)
                wide = max(least, round(window.width() * _INSPECTOR_SHARE))
            text = self.characters(_TEXT_CHARACTERS)
            wide = min(wide, max(centre - text, round(centre * _LEAST_SHARE)))
            widths = [left.width(), wide]
            window.resizeDocks([left, first], widths, Qt.Orientation.Horizontal)
        if window.isVisible():
            self._have_again(size)

    def enter(self, name: str) -> bool:
        """Show a dock or view and move the focus to its main widget, if anything takes it."""
        self.reveal(name)
        view = self.front(name)
        if view is None:  # it is made after the first painting
            return False
        chosen = view.focusProxy()
        if chosen is None or not chosen.isVisibleTo(view):
            pages = self._shared(name)
            chosen = next(iter(key_stops(view)), pages.bar if pages else None)
        if chosen is not None:
            chosen.setFocus(Qt.FocusReason.ShortcutFocusReason)
        return chosen is not None

    def note(self, name: str, text: str) -> None:
        """Show after a dock's title what it is about."""
        self._notes[name].say(text)

    def count(self, name: str, n: int) -> None:
        """Show the number of entries in a panel's title."""
        self._docks[name].setWindowTitle(f"{TITLES[name]} ({n:,})" if n else TITLES[name])

    def _stands_at_right(self, dock: QDockWidget) -> bool:
        open_here = not dock.isHidden() and not dock.isFloating()
        return open_here and self.window.dockWidgetArea(dock) is _RIGHT

    def restore(self, geometry: QByteArray, name: str, layout: QByteArray) -> None:
        """Restore the last places of the window and its docks, or the initial ones."""
        window = self.window
        if geometry.isEmpty() or not window.restoreGeometry(geometry):
            window.resize(*_FIRST_SIZE)
        self.apply(name, layout)

    def fit_screen(self) -> None:
        """Move and shrink the window to its screen, including the frame, which is known once it is
        visible."""
        window = self.window
        self._shares.fit_restored()
        if not self._fits_screen():
            self._take(self.layout_name)
            lay_out(self.window)
        room = window.screen().availableGeometry()
        frame = window.frameGeometry()
        if room.contains(frame) or window.isMaximized() or window.isFullScreen():
            return
        beside = frame.size() - window.size()
        window.resize(window.size().boundedTo(room.size() - beside))
        frame.setSize(window.size() + beside)
        frame.moveRight(min(frame.right(), room.right()))
        frame.moveBottom(min(frame.bottom(), room.bottom()))
        window.move(max(frame.left(), room.left()), max(frame.top(), room.top()))

    def _fit_restored(self, size: QSize) -> None:
        lay_out(self.window)
        self._shares.fit_restored()
        if not self._fits_screen():
            self.fit_screen()
        else:
            self._have_again(size)

    def _have_again(self, size: QSize) -> None:
        """Restore the window's size: it may have grown before views had hidden what has no room."""
        lay_out(self.window)
        QCoreApplication.sendPostedEvents(None, QEvent.Type.LayoutRequest.value)
        lay_out(self.window)
        if self.window.size() != size:
            self.window.resize(size)

    def _fits_screen(self) -> bool:
        """Whether the panels fit on the screen: as saved on a larger one, they would enlarge the
        window beyond this one."""
        window = self.window
        frame = window.frameGeometry().size() - window.size()
        least = window.minimumSizeHint() + frame
        return least.boundedTo(window.screen().availableGeometry().size()) == least

    def save(self) -> QByteArray:
        """Places of the docks, and the window's size; for `restore` and `apply`."""
        size = f"{self.window.width()}x{self.window.height()} "
        return QByteArray(size.encode()) + self.window.saveState(LAYOUT_VERSION)
