"""Builders for widgets, rows, columns and dialogs, one expression each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from PySide6.QtCore import QEvent, QPoint, Qt, SignalInstance
from PySide6.QtGui import (
    QAction,
    QHelpEvent,
    QKeySequence,
    QPainter,
    QPaintEvent,
    QPalette,
    QResizeEvent,
    QShortcut,
)
from PySide6.QtWidgets import (
    QBoxLayout,
    QDialog,
    QDialogButtonBox,
    QFrame,
    QHBoxLayout,
    QLabel,
    QLayout,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QSplitter,
    QToolButton,
    QToolTip,
    QVBoxLayout,
    QWidget,
)

from app.trace_models.shown_text import plain_tip

Part = QWidget | QLayout | int | tuple[Any, ...]
"""An element of a row or column: a widget, a layout, a stretch, or the arguments of addWidget."""
Margins = tuple[int, int, int, int]
"""Left, top, right, bottom, in pixels."""
_W = TypeVar("_W", bound=QWidget)
_L = TypeVar("_L", bound=QBoxLayout)


def made(
    kind: Callable[..., _W], *args: Any, bold: bool = False, muted: bool = False, **properties: Any
) -> _W:
    """A widget with these Qt properties; a signal's name connects it, to a function or another
    signal. muted: in a subdued colour. Raises AttributeError for an unknown name."""
    # PySide would call a signal given as a keyword, which is not callable
    signals = {k: v for k, v in properties.items() if isinstance(v, SignalInstance)}
    widget = kind(*args, **{k: v for k, v in properties.items() if k not in signals})
    for name, signal in signals.items():
        getattr(widget, name).connect(signal)
    if muted:
        widget.setForegroundRole(QPalette.ColorRole.PlaceholderText)
    if bold:
        font = widget.font()
        font.setBold(True)
        widget.setFont(font)
    return widget


def action_button(action: QAction, **more: Any) -> QToolButton:
    """A flat button with an action's icon and name. more: see made()."""
    name = action.text().replace("&", "")
    return made(QToolButton, defaultAction=action, autoRaise=True, accessibleName=name, **more)


def flat_button(text: str, tip: str, **more: Any) -> QToolButton:
    """A flat button. more: as for made()."""
    return made(QToolButton, text=text, toolTip=tip, autoRaise=True, **more)


def key_in(
    widget: QWidget, key: str | Qt.Key | QKeySequence.StandardKey, does: Callable[[], object]
) -> None:
    """A key binding while a widget has the focus."""
    shortcut = QShortcut(QKeySequence(key), widget)
    shortcut.setContext(Qt.ShortcutContext.WidgetShortcut)
    shortcut.activated.connect(does)


def shows_tip(event: QEvent, widget: QWidget, text_at: Callable[[QPoint], str]) -> bool:
    """Handle a tooltip event, showing `text_at` of the place, nothing if that is empty; returns
    whether it was one."""
    if not isinstance(event, QHelpEvent) or event.type() != QEvent.Type.ToolTip:
        return False
    QToolTip.showText(event.globalPos(), plain_tip(text_at(event.pos())), widget)
    return True


class Fitting:
    """First base of a widget whose parts `fit` arranges for each size."""

    def fit(self) -> None:
        raise NotImplementedError

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)  # type: ignore[misc]
        self.fit()


class Drawing(QWidget):
    """Painted by `draw` at each event."""

    def draw(self, painter: QPainter) -> None:
        raise NotImplementedError

    def paintEvent(self, _event: QPaintEvent) -> None:
        with QPainter(self) as painter:
            self.draw(painter)


class TipWidget(Drawing):
    """A drawing with tooltips by place."""

    def tip_at(self, at: QPoint) -> str:
        raise NotImplementedError

    def event(self, event: QEvent) -> bool:
        return shows_tip(event, self, self.tip_at) or super().event(event)


def scrolling(area: QScrollArea, page: QWidget, name: str = "") -> QScrollArea:
    """A frameless area that scrolls a page vertically."""
    area.setAccessibleName(name)
    area.setFrameShape(QFrame.Shape.NoFrame)
    area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
    area.setWidgetResizable(True)
    area.setWidget(page)
    return area


def words(
    text: str = "",
    *,
    wraps: bool = True,
    shrinks: bool = False,
    selectable: bool = False,
    **more: Any,
) -> QLabel:
    """A plain-text label. shrinks: it requires no width. more: see made()."""
    label = made(QLabel, text, textFormat=Qt.TextFormat.PlainText, wordWrap=wraps, **more)
    if shrinks:
        label.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
    if selectable:
        label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label


def hbox(
    *parts: Part, of: QWidget | None = None, margins: Margins | None = None, spacing: int = -1
) -> QHBoxLayout:
    """Elements from left to right. of: the widget to fill. margins, spacing: pixels, by default the
    style's."""
    return _filled(QHBoxLayout(), parts, of, margins, spacing)


def vbox(
    *parts: Part, of: QWidget | None = None, margins: Margins | None = None, spacing: int = -1
) -> QVBoxLayout:
    """Elements from top to bottom, otherwise as hbox()."""
    return _filled(QVBoxLayout(), parts, of, margins, spacing)


def _filled(
    layout: _L, parts: tuple[Part, ...], of: QWidget | None, margins: Margins | None, spacing: int
) -> _L:
    if of is not None:
        of.setLayout(layout)
    if margins is not None:
        layout.setContentsMargins(*margins)
    if spacing >= 0:
        layout.setSpacing(spacing)
    for part in parts:
        if isinstance(part, int):
            layout.addStretch(part)
            continue
        what, *more = part if isinstance(part, tuple) else (part,)
        add: Any = layout.addLayout if isinstance(what, QLayout) else layout.addWidget
        add(what, *more)
    return layout


UNLIMITED = 16_777_215
"""Qt's largest size of a widget, and its default maximum, pixels."""
SAME = 10_000
"""An equal size for all parts of a splitter, of any value."""


def split(
    *parts: QWidget, down: bool = False, sizes: Sequence[int] = (SAME, SAME, SAME)
) -> QSplitter:
    """Parts in a row, or stacked, with borders to drag, which hide no part. sizes: empty for the
    parts' size hints."""
    splitter = made(QSplitter, childrenCollapsible=False)
    turn(splitter, down=down)
    for part in parts:
        splitter.addWidget(part)
    if sizes:
        splitter.setSizes(sizes)
    return splitter


def turn(parts: QSplitter | QBoxLayout, *, down: bool) -> None:
    """Stack parts, or put them in a row."""
    if isinstance(parts, QSplitter):
        parts.setOrientation(Qt.Orientation.Vertical if down else Qt.Orientation.Horizontal)
    else:
        way = QBoxLayout.Direction
        parts.setDirection(way.TopToBottom if down else way.LeftToRight)


CANCEL, CLOSE = QDialogButtonBox.StandardButton.Cancel, QDialogButtonBox.StandardButton.Close


class ModelessDialog(QDialog):
    """A dialog that does not block the window, deleted on closing."""

    def __init__(self, title: str, parent: QWidget) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(title)

    def lay_out(
        self, *parts: Part, act: str, leave: QDialogButtonBox.StandardButton = CANCEL
    ) -> QPushButton:
        """Stack elements above a button that leaves and one that acts, which is returned; Return
        presses it."""
        buttons = made(QDialogButtonBox, leave, accepted=self.accept, rejected=self.reject)
        button = buttons.addButton(act, QDialogButtonBox.ButtonRole.AcceptRole)
        vbox(*parts, buttons, of=self)
        button.setDefault(True)  # inside the dialog by now; before that, Return would leave
        return button
