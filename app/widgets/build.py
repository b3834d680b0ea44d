"""Widgets made with their properties, rows and columns of them, in one expression each; dialogs."""

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
"""What lies in a row or column: a widget, a layout, a stretch, or the arguments of addWidget."""
Margins = tuple[int, int, int, int]
"""Left, top, right, bottom, in pixels."""
_W = TypeVar("_W", bound=QWidget)
_L = TypeVar("_L", bound=QBoxLayout)


def made(
    kind: Callable[..., _W], *args: Any, bold: bool = False, muted: bool = False, **properties: Any
) -> _W:
    """A widget with these of Qt's properties; the name of a signal connects it, to a function or
    another signal. muted: in the colour of what can be overlooked. Raises AttributeError for a name
    that is neither."""
    # PySide would call a signal that is given as a keyword, which cannot be called
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
    """A flat button with the icon of an action, named as it is. more: as for made()."""
    name = action.text().replace("&", "")
    return made(QToolButton, defaultAction=action, autoRaise=True, accessibleName=name, **more)


def key_in(
    widget: QWidget, key: str | Qt.Key | QKeySequence.StandardKey, does: Callable[[], object]
) -> None:
    """A key that does something while a widget has the focus."""
    shortcut = QShortcut(QKeySequence(key), widget)
    shortcut.setContext(Qt.ShortcutContext.WidgetShortcut)
    shortcut.activated.connect(does)


def shows_tip(event: QEvent, widget: QWidget, text_at: Callable[[QPoint], str]) -> bool:
    """Whether an event asks for a tooltip, which is shown then: what `text_at` gives for a place
    of the widget, none where that is empty."""
    if not isinstance(event, QHelpEvent) or event.type() != QEvent.Type.ToolTip:
        return False
    QToolTip.showText(event.globalPos(), plain_tip(text_at(event.pos())), widget)
    return True


class Drawing(QWidget):
    """Painted by `draw`, at each event."""

    def draw(self, painter: QPainter) -> None:
        raise NotImplementedError

    def paintEvent(self, _event: QPaintEvent) -> None:
        with QPainter(self) as painter:
            self.draw(painter)


class TipWidget(Drawing):
    """A drawing that says in a tooltip what is at a place of it."""

    def tip_at(self, at: QPoint) -> str:
        raise NotImplementedError

    def event(self, event: QEvent) -> bool:
        return shows_tip(event, self, self.tip_at) or super().event(event)


def scrolling(area: QScrollArea, page: QWidget, name: str = "") -> QScrollArea:
    """An area without a frame in which a page scrolls up and down."""
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
    """A label of plain text. shrinks: it asks for no width. more: as for made()."""
    label = made(QLabel, text, textFormat=Qt.TextFormat.PlainText, wordWrap=wraps, **more)
    if shrinks:
        label.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
    if selectable:
        label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label


def hbox(
    *parts: Part, of: QWidget | None = None, margins: Margins | None = None, spacing: int = -1
) -> QHBoxLayout:
    """Parts from left to right. of: the widget that they fill. margins, spacing: pixels, the
    style's where they are not given."""
    return _filled(QHBoxLayout(), parts, of, margins, spacing)


def vbox(
    *parts: Part, of: QWidget | None = None, margins: Margins | None = None, spacing: int = -1
) -> QVBoxLayout:
    """Parts from top to bottom, otherwise as hbox()."""
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
"""Pixels that Qt lets a widget take at most, unless something limits it."""
SAME = 10_000
"""Any size, given to all parts of a splitter."""


def split(
    *parts: QWidget, down: bool = False, sizes: Sequence[int] = (SAME, SAME, SAME)
) -> QSplitter:
    """Parts next to each other, or one under the other, with borders to drag, which hide no part.
    sizes: none, if the parts have those that they ask for."""
    splitter = made(QSplitter, childrenCollapsible=False)
    turn(splitter, down=down)
    for part in parts:
        splitter.addWidget(part)
    if sizes:
        splitter.setSizes(sizes)
    return splitter


def turn(parts: QSplitter | QBoxLayout, *, down: bool) -> None:
    """Put parts one under the other, or next to each other."""
    if isinstance(parts, QSplitter):
        parts.setOrientation(Qt.Orientation.Vertical if down else Qt.Orientation.Horizontal)
    else:
        way = QBoxLayout.Direction
        parts.setDirection(way.TopToBottom if down else way.LeftToRight)


CANCEL, CLOSE = QDialogButtonBox.StandardButton.Cancel, QDialogButtonBox.StandardButton.Close


class ModelessDialog(QDialog):
    """Does not block the window, and is gone once it is closed."""

    def __init__(self, title: str, parent: QWidget) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(title)

    def lay_out(
        self, *parts: Part, act: str, leave: QDialogButtonBox.StandardButton = CANCEL
    ) -> QPushButton:
        """Lay parts out one under the other, above a button that leaves and one that acts, which
        is returned: it accepts, also by Return."""
        buttons = made(QDialogButtonBox, leave, accepted=self.accept, rejected=self.reject)
        button = buttons.addButton(act, QDialogButtonBox.ButtonRole.AcceptRole)
        vbox(*parts, buttons, of=self)
        button.setDefault(True)  # in the dialog by now: before, Return would leave
        return button
